//! Once it is warm, the decoder thread allocates nothing in a step. What llama.cpp allocates is not seen here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use engine::{Engine, EngineConfig, GenerateOptions, MAX_RUN_AHEAD, SamplingConfig};
use fixtures::SmallModel;

/// Counts what is allocated by threads that are no hosts, while it is told to.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static HOST: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTS.load(Ordering::Relaxed) && !HOST.try_with(Cell::get).unwrap_or(true) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the system allocator's, which made the pointer.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are the system allocator's, which made the pointer.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tokens before it is warm, and tokens while it is counted.
const WARM_UP: u32 = 40;
const COUNTED: u32 = 260;
const TRIES: usize = 8;

/// What the decoder allocates while `COUNTED` tokens are taken of a completion.
fn allocations(engine: &Engine, sampling: SamplingConfig) -> u64 {
    let mut options = GenerateOptions::default();
    options.sampling = sampling;
    // More, so that it has something to do until the end.
    options.max_tokens = WARM_UP + COUNTED + MAX_RUN_AHEAD;
    options.logprobs = true;
    let mut generation = engine.generate("a", options).expect("a generation");
    let mut taken = 0;
    while taken < WARM_UP + COUNTED {
        taken += generation.next().expect("it goes on").tokens;
        if taken >= WARM_UP && !COUNTS.load(Ordering::Relaxed) {
            ALLOCATIONS.store(0, Ordering::Relaxed);
            COUNTS.store(true, Ordering::Relaxed);
        }
    }
    COUNTS.store(false, Ordering::Relaxed);
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// A decoder that finds nothing to do waits for its hosts, which allocates, and a busy machine makes it wait. So it may try
/// several times; a step that allocates does so each time.
#[test]
fn a_step_allocates_nothing() {
    HOST.set(true);
    let mut config = EngineConfig::default();
    config.run_ahead = MAX_RUN_AHEAD;
    config.max_sequences = 1;
    config.threads = Some(NonZeroU32::MIN);
    let engine = Engine::load(fixtures::small(SmallModel::Full), config).expect("a model");
    let mut drawn = SamplingConfig::default();
    (drawn.temperature, drawn.repetition_penalty, drawn.seed) = (0.7, 1.1, 1);
    for sampling in [SamplingConfig::greedy(), drawn] {
        let mut tries = (0..TRIES).map(|_| allocations(&engine, sampling));
        let fewest = tries.by_ref().take_while(|&count| count > 0).collect::<Vec<_>>();
        assert!(fewest.len() < TRIES, "allocations in {COUNTED} steps, each time: {fewest:?}");
    }
}
