//! What the C++ API costs: `sampleNext` through the bridge against `sample_next` of the engine itself.
//!
//! Both have an engine of their own with the same model, and take turns, because a step's time drifts by more than the
//! bridge adds. What is compared is the quickest turn of each: other work on the machine can only add to it.

#![allow(missing_docs, unreachable_pub, reason = "a bench has no users, and cxx takes no narrower `pub`")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use engine::{Engine, EngineConfig, SamplingConfig, Sequence, Token};
// The C++ half of this bench is linked with the package's library, the class with the bridge's.
use benches as _;
use engine_cxx as _;

#[cxx::bridge]
mod ffi {
    unsafe extern "C++" {
        include!("benches/benches/bridge.h");
        type CxxHost;
        fn new_host(model: &str) -> UniquePtr<CxxHost>;
        fn prompt(self: Pin<&mut CxxHost>, tokens: &[i32]) -> bool;
        fn sample(self: Pin<&mut CxxHost>, count: u32) -> bool;
        fn cross(self: Pin<&mut CxxHost>, count: u32) -> bool;
    }
}

const PROMPT: &str = "The quick brown fox jumps over the lazy dog. ";
/// Tokens in a turn.
const TOKENS: u32 = 64;

struct RustHost {
    sequence: Sequence,
    prompt: Vec<Token>,
    /// Keeps the model; after the sequence, which needs it.
    _engine: Engine,
}

impl RustHost {
    fn new(model: &str) -> Self {
        let mut config = EngineConfig::default();
        config.threads = std::num::NonZeroU32::new(1);
        let engine = Engine::load(model, config).expect("the model loads");
        let mut sequence = engine.create_sequence(SamplingConfig::greedy()).expect("a slot is free");
        // As the C++ API does.
        sequence.set_compute_logprob(true);
        let prompt = engine.model().tokenize(PROMPT, true, false).expect("the prompt has tokens");
        Self { sequence, prompt, _engine: engine }
    }

    fn turn(&mut self) -> Duration {
        self.sequence.trim(0).expect("everything can be trimmed");
        self.sequence.decode_prompt(&self.prompt, 0).expect("the prompt fits");
        self.sequence.sample_next().expect("the seed token is there");
        let begin = Instant::now();
        for _ in 0..TOKENS {
            black_box(self.sequence.sample_next().expect("the window has room"));
        }
        begin.elapsed()
    }
}

fn per_token(turn: Duration) -> f64 {
    turn.as_secs_f64() * 1e6 / f64::from(TOKENS)
}

fn bridge(criterion: &mut Criterion) {
    let small = ("small", fixtures::small(fixtures::SmallModel::Full), 101);
    let real = ("real", fixtures::manifest::test_model().unwrap_or_default(), 7);
    let mut cross = None;
    for (name, path, turns) in [small, real] {
        if !path.is_file() {
            println!("bridge, {name} model: not there, `cargo xtask fixtures` fetches it");
            continue;
        }
        let model = path.to_str().expect("the model's path is text");
        let mut rust = RustHost::new(model);
        let mut cxx = ffi::new_host(model);
        let prompt = rust.prompt.clone();
        let mut cxx_turn = || {
            assert!(cxx.pin_mut().prompt(&prompt), "the prompt is decoded");
            let begin = Instant::now();
            assert!(cxx.pin_mut().sample(TOKENS), "all tokens are there");
            begin.elapsed()
        };
        let mut quickest = (Duration::MAX, Duration::MAX);
        for _ in 0..turns {
            quickest = (quickest.0.min(rust.turn()), quickest.1.min(cxx_turn()));
        }
        let (through_rust, through_cxx) = quickest;
        println!(
            "bridge, {name} model: {:.2} µs a token in Rust, {:.2} µs in C++, ratio {:.4}",
            per_token(through_rust),
            per_token(through_cxx),
            through_cxx.as_secs_f64() / through_rust.as_secs_f64()
        );
        cross.get_or_insert(cxx);
    }

    let mut host = cross.expect("the small model is in the repository");
    criterion.bench_function("bridge/crossing", |bencher| {
        bencher.iter_custom(|iterations| {
            let count = u32::try_from(iterations).expect("criterion asks for fewer");
            let begin = Instant::now();
            assert!(host.pin_mut().cross(count), "an unknown sequence has ended");
            begin.elapsed()
        });
    });
}

criterion_group!(benches, bridge);
criterion_main!(benches);
