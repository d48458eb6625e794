//! What crosses from C++ to Rust. Every function ends a panic here and answers with the value that the header documents
//! for a failure: an unwind that reached C++ would abort the host.

#![allow(clippy::unnecessary_box_returns, reason = "C++ can hold a Rust type in a box only")]

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use crate::host::Host;

/// The types and functions on the boundary.
#[allow(missing_docs, reason = "cxx passes no documentation on to what it generates for a shared type")]
#[cxx::bridge(namespace = "cotabby::bridge")]
pub mod ffi {
    /// `EngineStatus` of the header, number for number.
    #[derive(Debug)]
    #[repr(i32)]
    enum Status {
        Ok = 0,
        Error = 1,
        Cancelled = 2,
        NotLoaded = 3,
    }

    /// `CotabbyEngineOptions` of the header.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Options {
        gpu_layers: i32,
        context_window_tokens: i32,
        batch_size: i32,
        max_sequences: i32,
        thread_count: i32,
        run_ahead_tokens: i32,
    }

    /// `SamplingConfig` of the header.
    #[derive(Debug, Clone, PartialEq)]
    struct Sampling {
        max_prediction_tokens: i32,
        temperature: f32,
        top_k: i32,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        seed: u32,
        single_line: bool,
    }

    /// `SampleResult` of the header.
    #[derive(Debug, Clone, PartialEq)]
    struct Sample {
        token: i32,
        piece: &'static [u8],
        is_eos: bool,
        was_cancelled: bool,
        logprob: f32,
        argmax_is_eog: bool,
    }

    /// What the getters of the header answer; all 0 without a model.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    struct Loaded {
        context_window_tokens: i32,
        batch_size: i32,
        thread_count: i32,
        gpu_layers: i32,
        max_sequences: i32,
    }

    /// `CotabbyEngineMetrics` of the header.
    #[derive(Debug, Clone, Default, PartialEq)]
    struct Metrics {
        steps: u64,
        rows: u64,
        decode_steps: u64,
        decode_rows: u64,
        sampled: u64,
        discarded: u64,
        decode_failures: u64,
        step_seconds: f64,
    }

    extern "Rust" {
        type Host;
        fn new_host() -> Box<Host>;
        fn load_model(host: &Host, path: &[u8], options: &Options) -> Status;
        fn unload_model(host: &Host);
        fn is_model_loaded(host: &Host) -> bool;
        fn loaded(host: &Host) -> Loaded;
        fn metrics(host: &Host) -> Metrics;
        fn last_error(host: &Host) -> Vec<u8>;
        fn refuse(host: &Host, why: &str);
        fn tokenize(host: &Host, text: &[u8], add_special: bool, parse_special: bool) -> Vec<i32>;
        fn token_text(host: &Host, token: i32) -> Vec<u8>;
        fn token_piece(host: &Host, token: i32) -> Vec<u8>;
        fn has_chat_template(host: &Host) -> bool;
        fn apply_chat_template(
            host: &Host,
            system: &[u8],
            has_system: bool,
            user: &[u8],
            add_assistant: bool,
        ) -> Vec<u8>;
        fn create_sequence(host: &Host, sampling: &Sampling) -> i32;
        fn destroy_sequence(host: &Host, id: i32);
        fn decode_prompt(host: &Host, id: i32, tokens: &[i32], start_position: i32) -> Status;
        fn sample_next(host: &Host, id: i32) -> Sample;
        fn trim(host: &Host, id: i32, keep_positions: i32) -> bool;
        fn position_count(host: &Host, id: i32) -> i32;
        fn set_force_word_continuation(host: &Host, id: i32, enabled: bool);
        fn set_compute_logprob(host: &Host, id: i32, enabled: bool);
        fn cancel_sequence(host: &Host, id: i32);
    }
}

use ffi::{Loaded, Metrics, Options, Sample, Sampling, Status};

impl Sample {
    /// What there is to say when there is no token.
    pub(crate) const ENDED: Self = Self {
        token: -1,
        piece: &[],
        is_eos: true,
        was_cancelled: false,
        logprob: 0.0,
        argmax_is_eog: false,
    };
}

/// The state stays consistent across a panic: locks are taken over from the thread that panicked, and what they guard is
/// changed in single steps.
fn guard<T>(failure: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(failure)
}

fn new_host() -> Box<Host> {
    Box::default()
}

fn load_model(host: &Host, path: &[u8], options: &Options) -> Status {
    guard(Status::Error, || host.load_model(path, options))
}

fn unload_model(host: &Host) {
    guard((), || host.unload_model());
}

fn is_model_loaded(host: &Host) -> bool {
    guard(false, || host.is_model_loaded())
}

fn loaded(host: &Host) -> Loaded {
    guard(Loaded::default(), || host.loaded())
}

fn metrics(host: &Host) -> Metrics {
    guard(Metrics::default(), || host.metrics())
}

fn last_error(host: &Host) -> Vec<u8> {
    guard(Vec::new(), || host.last_error().into_bytes())
}

/// For what C++ finds wrong with an argument.
fn refuse(host: &Host, why: &str) {
    guard((), || host.fail(why, ()));
}

fn tokenize(host: &Host, text: &[u8], add_special: bool, parse_special: bool) -> Vec<i32> {
    guard(Vec::new(), || host.tokenize(text, add_special, parse_special))
}

fn token_text(host: &Host, token: i32) -> Vec<u8> {
    guard(Vec::new(), || host.token_text(token))
}

fn token_piece(host: &Host, token: i32) -> Vec<u8> {
    guard(Vec::new(), || host.token_piece(token))
}

fn has_chat_template(host: &Host) -> bool {
    guard(false, || host.has_chat_template())
}

fn apply_chat_template(
    host: &Host,
    system: &[u8],
    has_system: bool,
    user: &[u8],
    add_assistant: bool,
) -> Vec<u8> {
    guard(Vec::new(), || host.apply_chat_template(has_system.then_some(system), user, add_assistant))
}

fn create_sequence(host: &Host, sampling: &Sampling) -> i32 {
    guard(-1, || host.create_sequence(sampling))
}

fn destroy_sequence(host: &Host, id: i32) {
    guard((), || host.destroy_sequence(id));
}

fn decode_prompt(host: &Host, id: i32, tokens: &[i32], start_position: i32) -> Status {
    guard(Status::Error, || host.decode_prompt(id, tokens, start_position))
}

fn sample_next(host: &Host, id: i32) -> Sample {
    guard(Sample::ENDED, || host.sample_next(id))
}

fn trim(host: &Host, id: i32, keep_positions: i32) -> bool {
    guard(false, || host.trim(id, keep_positions))
}

fn position_count(host: &Host, id: i32) -> i32 {
    guard(0, || host.position_count(id))
}

fn set_force_word_continuation(host: &Host, id: i32, enabled: bool) {
    guard((), || host.set_force_word_continuation(id, enabled));
}

fn set_compute_logprob(host: &Host, id: i32, enabled: bool) {
    guard((), || host.set_compute_logprob(id, enabled));
}

fn cancel_sequence(host: &Host, id: i32) {
    guard((), || host.cancel_sequence(id));
}

#[cfg(test)]
mod tests {
    use super::guard;

    #[test]
    fn a_panic_ends_at_the_boundary() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let answer = guard(-1, || panic!("this is what the test is about"));
        std::panic::set_hook(hook);
        assert_eq!(answer, -1);
    }
}
