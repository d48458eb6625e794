//! Long prompts beside streams: a thread with a context of its own decodes them, so that a stream's steps stay short, and
//! hands back what the memory then holds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use flume::{Receiver, Sender, WeakSender};

use crate::backend::{Backend, DecodeFailure, Row};
use crate::model::Token;
use crate::protocol::{Command, Shared};

/// The slot of a context that has one.
const SLOT: u32 = 0;

/// A prompt to decode.
pub(crate) struct Job {
    /// What the memory holds of the sequence already: so many positions.
    pub(crate) start: u32,
    pub(crate) state: Vec<u8>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) shared: Arc<Shared>,
    /// Set when nobody wants it any more.
    pub(crate) unwanted: Arc<AtomicBool>,
}

/// What became of a [`Job`]: the sequence's state with all tokens in it; `None`: nobody wanted it any more.
pub(crate) type Prefilled = Result<Option<Vec<u8>>, String>;

/// The handle on the thread. Dropping it breaks off what is under way, and waits for that.
pub(crate) struct Prefiller {
    /// The engine's threads from which on it pays.
    pub(crate) from_threads: u32,
    jobs: Option<Sender<Job>>,
    threads: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Prefiller {
    /// Starts the thread. It calls `make` for its context at the first job, decodes `chunk` rows at a time, and answers with
    /// [`Command::Prefilled`].
    pub(crate) fn start<B: Backend>(
        make: impl Fn() -> Result<B, String> + Send + 'static,
        chunk: u32,
        from_threads: u32,
        commands: WeakSender<Command>,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = flume::bounded(1);
        let (threads, stop) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicBool::new(false)));
        let worker = Worker { threads: Arc::clone(&threads), stop: Arc::clone(&stop), chunk, commands };
        let thread = std::thread::Builder::new()
            .name("prefill".to_owned())
            .spawn(move || worker.run(&make, &queue))?;
        Ok(Self { from_threads, jobs: Some(jobs), threads, stop, thread: Some(thread) })
    }

    /// Gives it a job. There is one at a time. `false`: the thread has ended.
    #[must_use]
    pub(crate) fn send(&self, job: Job) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok())
    }

    /// Sets the CPU threads from the next chunk on.
    pub(crate) fn set_threads(&self, threads: u32) {
        self.threads.store(threads.max(1), Ordering::Relaxed);
    }
}

impl Drop for Prefiller {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    threads: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    chunk: u32,
    commands: WeakSender<Command>,
}

impl Worker {
    fn run<B: Backend>(&self, make: &dyn Fn() -> Result<B, String>, jobs: &Receiver<Job>) {
        let mut backend = None;
        while let Ok(mut job) = jobs.recv() {
            let work = || {
                if self.is_unwanted(&job) {
                    return Ok(None);
                }
                let backend = match &mut backend {
                    Some(backend) => backend,
                    none => none.insert(make()?),
                };
                self.decode(backend, &mut job)
            };
            let prefilled =
                catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("it panicked".to_owned()));
            // Whoever waits for this holds the channel open.
            let Some(commands) = self.commands.upgrade() else { return };
            if commands.send(Command::Prefilled(prefilled)).is_err() {
                return;
            }
        }
    }

    fn is_unwanted(&self, job: &Job) -> bool {
        self.stop.load(Ordering::Relaxed) || job.unwanted.load(Ordering::Relaxed) || job.shared.is_cancelled()
    }

    fn decode<B: Backend>(&self, backend: &mut B, job: &mut Job) -> Prefilled {
        let state = std::mem::take(&mut job.state);
        if !backend.remove(SLOT, 0) || (job.start > 0 && !backend.load(SLOT, state)) {
            return Err("the context took no state".to_owned());
        }
        let mut rows = Vec::with_capacity(self.chunk as usize);
        let mut position = job.start;
        for tokens in job.tokens.chunks(self.chunk as usize) {
            rows.clear();
            rows.extend(tokens.iter().zip(position..).map(|(&token, position)| Row {
                slot: SLOT,
                token,
                position,
                output: false,
            }));
            position += tokens.len() as u32;
            backend.set_threads(self.threads.load(Ordering::Relaxed));
            match backend.decode(&rows, &|| self.is_unwanted(job)) {
                Ok(()) => backend.synchronize(),
                Err(DecodeFailure::Aborted) => return Ok(None),
                Err(DecodeFailure::NoKvCells) => return Err("the context had no cells".to_owned()),
                Err(DecodeFailure::Failed(reason) | DecodeFailure::Thrown(reason)) => return Err(reason),
            }
        }
        if self.is_unwanted(job) {
            return Ok(None);
        }
        backend.save(SLOT).map(Some).ok_or_else(|| "the context gave no state".to_owned())
    }
}
