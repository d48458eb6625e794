//! What the tests have in common: models, prompts, and what a sequence says when it has an engine to itself.

// Each test binary uses its own part of it.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{Engine, EngineConfig, KvLayout, MemoryKind, Sample, SamplingConfig, Sequence, Token};
use fixtures::SmallModel;
use fixtures::manifest::{self, TEST_MODEL_VARIABLE};

/// What rounding can change of a probability on a real model: llama.cpp's kernels for 4-bit weights round the activations
/// of one row and of four in different ways.
const REAL_NOISE: f32 = 0.1;
/// What it can change of a log-probability on the small models, which have 16-bit weights.
const SMALL_NOISE: f32 = 0.01;

/// A model to test with.
#[derive(Debug, Clone)]
pub struct Subject {
    pub path: PathBuf,
    /// Whether its greedy choices may hang on rounding.
    pub real: bool,
}

impl Subject {
    pub fn small(model: SmallModel) -> Self {
        Self { path: fixtures::small(model), real: false }
    }

    pub fn load(&self, set: impl FnOnce(&mut EngineConfig)) -> Engine {
        let mut config = config();
        set(&mut config);
        Engine::load(&self.path, config).unwrap_or_else(|error| panic!("{error}"))
    }
}

pub fn all_small() -> Vec<Subject> {
    SmallModel::ALL.into_iter().map(Subject::small).collect()
}

/// SmolLM2 and Gemma 3, or the one model that `COTABBY_TEST_MODEL_PATH` names. It is an error if one is not there.
pub fn all_real() -> Vec<Subject> {
    let replaced = std::env::var_os(TEST_MODEL_VARIABLE).is_some_and(|path| !path.is_empty());
    let paths = if replaced {
        vec![manifest::test_model()]
    } else {
        ["smollm2-135m", "gemma3-270m"].into_iter().map(manifest::real_model).collect()
    };
    let subject = |path: Result<PathBuf, _>| Subject {
        path: path.unwrap_or_else(|error: manifest::ManifestError| panic!("{error}")),
        real: true,
    };
    paths.into_iter().map(subject).collect()
}

pub fn all() -> Vec<Subject> {
    all_small().into_iter().chain(all_real()).collect()
}

pub fn full() -> Subject {
    Subject::small(SmallModel::Full)
}

/// One thread: the tests run several at once already, and threads that wait for each other suffer on a busy machine.
pub fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.threads = NonZeroU32::new(1);
    config.context_window = 512;
    config.batch_size = 128;
    config
}

pub fn greedy() -> SamplingConfig {
    SamplingConfig::greedy()
}

/// A draw that the model's first choice does not decide.
pub fn hot(seed: u32) -> SamplingConfig {
    let mut sampling = SamplingConfig::default();
    sampling.temperature = 3.0;
    sampling.top_k = 0;
    sampling.top_p = 1.0;
    sampling.min_p = 0.0;
    sampling.seed = seed;
    sampling
}

pub fn with(mut sampling: SamplingConfig, set: impl FnOnce(&mut SamplingConfig)) -> SamplingConfig {
    set(&mut sampling);
    sampling
}

pub fn sequence(engine: &Engine, sampling: SamplingConfig) -> Sequence {
    engine.create_sequence(sampling).unwrap_or_else(|error| panic!("{error}"))
}

/// Prompts of different lengths, the same for the same index.
pub fn prompt(engine: &Engine, index: usize) -> Vec<Token> {
    const TEXTS: [&str; 5] = [
        "The quick brown fox jumps over the lazy dog and",
        "In the winter garden there was never a cloud, so we go up to the hill and on to the river,",
        "Hello world! My",
        "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,",
        "Paper, stone; stone, river: it is not the sun or the cat that",
    ];
    text(engine, TEXTS[index % TEXTS.len()])
}

/// A prompt of exactly `length` tokens.
pub fn long_prompt(engine: &Engine, length: usize) -> Vec<Token> {
    let mut tokens = prompt(engine, 0);
    let words = engine.model().tokenize(" the river and a stone on the hill", false, false);
    tokens.extend(words.unwrap_or_else(|error| panic!("{error}")).into_iter().cycle().take(length));
    tokens.truncate(length);
    tokens
}

pub fn text(engine: &Engine, text: &str) -> Vec<Token> {
    engine.model().tokenize(text, true, false).unwrap_or_else(|error| panic!("{error}"))
}

pub fn start(sequence: &mut Sequence, prompt: &[Token]) {
    sequence.decode_prompt(prompt, 0).unwrap_or_else(|error| panic!("{error}"));
}

pub fn next(sequence: &mut Sequence) -> Sample {
    sequence.sample_next().unwrap_or_else(|error| panic!("{error}"))
}

pub fn take(sequence: &mut Sequence, count: usize) -> Vec<Token> {
    (0..count).map(|_| next(sequence).token).collect()
}

/// A completion from the start.
pub fn complete(sequence: &mut Sequence, prompt: &[Token], count: usize) -> Vec<Token> {
    start(sequence, prompt);
    take(sequence, count)
}

/// A completion with each token's log-probability.
pub fn samples(sequence: &mut Sequence, prompt: &[Token], count: usize) -> Vec<Sample> {
    sequence.set_compute_logprob(true);
    start(sequence, prompt);
    (0..count).map(|_| next(sequence)).collect()
}

/// What a fresh sequence says that has `engine` to itself.
pub fn alone(engine: &Engine, prompt: &[Token], count: usize) -> Vec<Sample> {
    samples(&mut sequence(engine, greedy()), prompt, count)
}

pub fn tokens(samples: &[Sample]) -> Vec<Token> {
    samples.iter().map(|sample| sample.token).collect()
}

/// That a sequence says together with others what it says alone. On a real model the two may part, and end the
/// comparison, where both choices are as likely as each other.
pub fn assert_same(real: bool, together: &[Sample], alone: &[Sample], what: &str) {
    assert_eq!(together.len(), alone.len(), "{what}");
    for (index, (a, b)) in together.iter().zip(alone).enumerate() {
        let near = if real {
            (a.logprob.exp() - b.logprob.exp()).abs() < REAL_NOISE
        } else {
            (a.logprob - b.logprob).abs() < SMALL_NOISE
        };
        assert!(near, "{what}: token {index} has log-probability {} and {} alone", a.logprob, b.logprob);
        if real && a.token != b.token {
            assert!(index > 0, "{what}: the first tokens differ");
            return;
        }
        assert_eq!(a.token, b.token, "{what}: token {index}");
    }
}

pub fn rolls_back(engine: &Engine) -> bool {
    match engine.model().memory_kind() {
        MemoryKind::Full => true,
        MemoryKind::SlidingWindow { .. } => {
            engine.config().full_sliding_window && engine.config().kv_layout != KvLayout::Unified
        }
        _ => false,
    }
}

/// Runs `disturb` beside a sequence that streams, and checks that it says what it says alone: before, during and after.
pub fn beside_a_neighbour<R>(engine: &Engine, disturb: impl FnOnce() -> R) -> R {
    const AFTER: usize = 30;
    const AT_MOST: usize = 200;
    let prompt = prompt(engine, 1);
    let mut neighbour = sequence(engine, greedy());
    let mut said = complete(&mut neighbour, &prompt, 10);
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let streaming = scope.spawn(|| {
            while said.len() < AT_MOST && !done.load(Ordering::Relaxed) {
                said.push(next(&mut neighbour).token);
            }
            said.extend(take(&mut neighbour, AFTER));
        });
        let result = disturb();
        done.store(true, Ordering::Relaxed);
        if let Err(panic) = streaming.join() {
            std::panic::resume_unwind(panic);
        }
        result
    });
    drop(neighbour);
    let fresh = full().load(|_| {});
    assert_eq!(
        said,
        complete(&mut sequence(&fresh, greedy()), &prompt, said.len()),
        "the neighbour's tokens"
    );
    result
}

/// Runs `work` in so many threads at once, and returns what each has made.
pub fn in_threads<R: Send>(count: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|index| scope.spawn(move || work(index))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// A file of these bytes, in the folder that cargo keeps for tests.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    fs::write(&path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}

pub fn full_bytes() -> Vec<u8> {
    fs::read(full().path).expect("the committed model")
}

/// Where the bytes are; they are there once.
pub fn find(bytes: &[u8], wanted: &[u8]) -> usize {
    let mut found = bytes.windows(wanted.len()).enumerate().filter(|(_, window)| *window == wanted);
    let (at, _) = found.next().expect("the bytes are there");
    assert!(found.next().is_none(), "the bytes are there once");
    at
}
