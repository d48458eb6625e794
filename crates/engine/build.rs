//! Compiles the guard that keeps C++ exceptions out of Rust.

fn main() {
    println!("cargo:rerun-if-changed=src/llama/guard.cc");
    let mut build = cc::Build::new();
    if std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "msvc") {
        // Exceptions, also of functions that are declared `extern "C"`.
        build.flag("/EHs");
    }
    build.cpp(true).std("c++17").file("src/llama/guard.cc").compile("engine_guard");
}
