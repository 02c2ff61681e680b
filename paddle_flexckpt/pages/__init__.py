"""HTML pages and pictures of reports. A page needs only a browser; pictures need matplotlib."""
