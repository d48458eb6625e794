//! To be filled in.
fn main() {}
