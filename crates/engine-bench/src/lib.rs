//! Bench scenarios: raw llama.cpp loops and the engine, side by side, each written once and used by the command line,
//! by the criterion benches and by the tests.
//!
//! In reading order: [`settings`] says what a run is made of, [`scenarios`] has one file a scenario and the driver that
//! those with host threads share, [`raw`] is llama.cpp without the engine (the only unsafe code), [`latency`] turns
//! durations into percentiles, and [`report`] makes the line of JSON.
//!
//! What all scenarios share: every sequence decodes the same prompt and takes its seed sample; then a few samples are
//! taken to come to a steady state (graphs are built, what the engine has sampled ahead while its hosts waited for each
//! other is used up); then the clock starts.

pub mod error;
pub mod latency;
pub mod raw;
pub mod report;
pub mod scenarios;
pub mod settings;

pub use error::BenchError;
pub use report::{Outcome, Report};
pub use scenarios::{Models, Scenario};
pub use settings::Settings;
