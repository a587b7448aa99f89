"""Bodies of HTTP requests and answers, which every route reads and writes by these functions."""
