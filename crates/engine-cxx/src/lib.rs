//! The C++ API of the engine. Hosts see `include/CotabbyInferenceEngine.h` and nothing else.
//!
//! In reading order: [`bridge`] is what crosses the language boundary, and where panics stop; [`host`] is what a C++
//! engine object holds: the loaded model, its sequences and their ids; `pieces` keeps the bytes that C++ borrows.
//! `CotabbyInferenceEngine.cc` adapts the class, its raw pointers and sizes, to the bridge, and is where exceptions stop.
//! What a token is and when it is decoded is not known here: that is the `engine` crate's.

pub mod bridge;
pub mod host;
mod pieces;
