"""What passes through a stream, and how a stream that broke off goes on. Pure."""
