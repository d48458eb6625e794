//! The decoder and its hosts' handles, from several threads, over a scripted backend.

mod calls;
mod cancel;
mod faults;
mod lifecycle;
mod oracle;
mod prefill;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::backend::scripted::{Poison, Script, Scripted, VOCABULARY};
use crate::config::SamplingConfig;
use crate::decoder::{Decoder, Setup};
use crate::error::CreateSequenceError;
use crate::metrics::{Counters, Metrics};
use crate::model::Token;
use crate::prefill::Prefiller;
use crate::protocol::Command;
use crate::sampling::Masks;
use crate::scheduler::Limits;
use crate::sequence::{Link, Sequence};

#[derive(Debug, Clone)]
struct Options {
    max_sequences: u32,
    window: u32,
    batch: u32,
    run_ahead: u32,
    rolls_back: bool,
    asynchronous: bool,
    sampling_threads: usize,
    queue_capacity: u32,
    /// Rows of a chunk in a context for long prompts; 0: there is none.
    separate_chunk: u32,
    poison: Poison,
    /// By default no token is.
    is_eog: fn(Token) -> bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_sequences: 4,
            window: 256,
            batch: 16,
            run_ahead: 4,
            rolls_back: true,
            asynchronous: false,
            sampling_threads: 1,
            queue_capacity: 1024,
            separate_chunk: 0,
            poison: Poison::default(),
            is_eog: |_| false,
        }
    }
}

/// What an engine is without a model.
struct Rig {
    link: Link,
    script: Arc<Script>,
    /// Of the context for long prompts.
    prefill_script: Arc<Script>,
    counters: Arc<Counters>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Rig {
    fn new(options: &Options) -> Self {
        let script = Arc::new(Script::default());
        script.set_poison(options.poison);
        let counters = Arc::new(Counters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (commands, receiver) = flume::bounded(options.queue_capacity as usize);
        let setup = Setup {
            limits: Limits {
                max_sequences: options.max_sequences,
                window: options.window,
                batch: options.batch,
                run_ahead: if options.rolls_back { options.run_ahead } else { 0 },
                straggler_window: Duration::from_micros(50),
                prefill_step: Duration::from_millis(25),
                prefill_stretch: 3.0,
                kv_per_sequence: false,
            },
            asynchronous: options.asynchronous,
            one_state: !options.rolls_back,
            looks_back: None,
            aborts_shared: options.rolls_back,
            threads: Some(1),
            cores: 1,
            sampling_threads: options.sampling_threads,
            is_eog: Box::new(options.is_eog),
            vocabulary_size: VOCABULARY as usize,
            masks: masks(options.is_eog),
            stop: Arc::clone(&stop),
            counters: Arc::clone(&counters),
        };
        let backend =
            Scripted::new(Arc::clone(&script), options.max_sequences, options.batch, options.rolls_back);
        let prefill_script = Arc::new(Script::default());
        prefill_script.set_poison(options.poison);
        let prefiller = (options.separate_chunk > 0).then(|| {
            let (script, chunk) = (Arc::clone(&prefill_script), options.separate_chunk);
            let make = move || Ok(Scripted::new(Arc::clone(&script), 1, chunk, true));
            Prefiller::start(make, chunk, 1, commands.downgrade()).expect("there is a thread")
        });
        let decoder = Decoder::new(backend, setup, receiver, prefiller);
        let link = Link {
            commands,
            window: options.window,
            vocabulary: VOCABULARY,
            queue_capacity: options.queue_capacity,
            max_sequences: options.max_sequences,
            rolls_back: options.rolls_back,
        };
        let thread = Some(std::thread::spawn(move || decoder.run()));
        Self { link, script, prefill_script, counters, stop, thread }
    }

    fn create(&self, sampling: SamplingConfig) -> Result<Sequence, CreateSequenceError> {
        Sequence::create(sampling, self.link.clone())
    }

    fn greedy(&self) -> Sequence {
        self.create(SamplingConfig::greedy()).expect("there is a free slot")
    }

    /// A greedy sequence with a prompt.
    fn prompted(&self, prompt: &[Token]) -> Sequence {
        let mut sequence = self.greedy();
        sequence.decode_prompt(prompt, 0).expect("the prompt is decoded");
        sequence
    }

    fn metrics(&self) -> Metrics {
        self.counters.snapshot()
    }

    /// As a dropped engine does it.
    fn shut_down(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.link.commands.send(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.script.open();
        self.prefill_script.open();
        self.shut_down();
    }
}

/// A vocabulary with a few tokens of each kind.
fn masks(is_eog: fn(Token) -> bool) -> Masks {
    Masks::new(VOCABULARY, |token, piece| {
        piece.extend_from_slice(match token % 6 {
            0 => b" word",
            1 => b"line\n",
            _ => b"word",
        });
        (is_eog(token), token == 2)
    })
}

/// The next `count` tokens.
fn take(sequence: &mut Sequence, count: usize) -> Vec<Token> {
    (0..count).map(|_| sequence.sample_next().expect("a token").token).collect()
}

/// What a greedy completion of `prompt` begins with, by the oracle.
fn expected(prompt: &[Token], count: usize) -> Vec<Token> {
    let mut oracle = oracle::Oracle::new(&Options::default(), SamplingConfig::greedy());
    oracle.prompt(prompt, 0).expect("the prompt is valid");
    (0..count).map(|_| oracle.sample().expect("a token").token).collect()
}

/// Runs `test` on a thread, and panics if that takes a minute.
fn in_time<R: Send + 'static>(test: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, finished) = flume::bounded(1);
    let thread = std::thread::spawn(move || {
        let result = test();
        let _ = done.send(());
        result
    });
    let ended = finished.recv_timeout(Duration::from_secs(60));
    assert!(ended != Err(flume::RecvTimeoutError::Timeout), "it hangs");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
