"""Read and write files on a local or network file system or an object store."""
