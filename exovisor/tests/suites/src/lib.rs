//! Nothing: only the dependencies are wanted.
