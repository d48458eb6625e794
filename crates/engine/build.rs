//! Compiles the guard that keeps C++ exceptions out of Rust.

fn main() {
    println!("cargo:rerun-if-changed=src/llama/guard.cc");
    cc::Build::new().cpp(true).std("c++17").file("src/llama/guard.cc").compile("engine_guard");
}
