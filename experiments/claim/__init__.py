"""What the 357x of DiLoCoX is a ratio of, on several kinds of evidence."""
