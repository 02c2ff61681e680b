"""AOA: the language, the compiler, and a differential test against an oracle on whole arrays."""
