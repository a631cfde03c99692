"""The five papers, table by table: what they say as plain data, what is measured, and whether it holds."""
