//! Compiles the bridge and the C++ adapter that hosts see.

fn main() {
    cxx_build::bridge("src/bridge.rs")
        .file("src/CotabbyInferenceEngine.cc")
        .include("include")
        .std("c++17")
        .flag_if_supported("/EHsc")
        .flag_if_supported("-Wall")
        .flag_if_supported("-Wextra")
        .flag_if_supported("-fvisibility=hidden")
        .compile("cotabby_adapter");
    println!("cargo::rerun-if-changed=src/bridge.rs");
    println!("cargo::rerun-if-changed=src/CotabbyInferenceEngine.cc");
    println!("cargo::rerun-if-changed=include/CotabbyInferenceEngine.h");
}
