"""HTML pages and pictures of what reports say. They need nothing but a browser; pictures need matplotlib."""
