//! Compiles the C++ half of the bridge's bench.

fn main() {
    cxx_build::bridge("benches/bridge.rs")
        .file("benches/bridge.cc")
        .include("../crates/engine-cxx/include")
        .std("c++17")
        .flag_if_supported("/EHsc")
        .compile("bridge_bench");
    for file in ["benches/bridge.rs", "benches/bridge.cc", "benches/bridge.h"] {
        println!("cargo::rerun-if-changed={file}");
    }
}
