//! The handle on a loaded model and its decoder thread.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use flume::{Sender, WeakSender};

use crate::config::{EngineConfig, KvLayout, PrefillContext, SamplingConfig};
use crate::decoder::{Decoder, ENGINES, Setup, share_of_cores};
use crate::error::{CreateSequenceError, GenerateError, LoadError};
use crate::generate::{GenerateOptions, Generation, Prompt};
use crate::llama::{LlamaContext, LlamaModel};
use crate::metrics::{Counters, Metrics, Timings};
use crate::model::{MemoryKind, Model};
use crate::prefill::Prefiller;
use crate::protocol::{Command, answer};
use crate::sampling::Masks;
use crate::scheduler::{LENT_THREADS, Limits};
use crate::sequence::{Link, Sequence};

/// A loaded model, the llama.cpp context of all sequences, and the thread that decodes for them. (A long prompt may have a
/// context and a thread of its own: [`PrefillContext`].)
///
/// It may be shared between threads (`Arc<Engine>`, or by reference). Dropping it ends what is in flight with a
/// `Shutdown` error, joins the thread and frees the context; sequences that outlive it answer with that error.
pub struct Engine {
    model: Model,
    config: EngineConfig,
    threads: u32,
    link: Link,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.model)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A step's wall time with a prompt in it over one without, by default: the prompt gets three quarters of the time.
const PREFILL_STRETCH: f32 = 4.0;
/// How long such a step may take in any case where a GPU does the model's work: three frames of a screen. Small chunks cost
/// nearly as much as large ones there.
const DEVICE_PREFILL_STEP: Duration = Duration::from_millis(50);
/// The same on a processor, where llama.cpp's faster attention begins with 64 rows.
const PROCESSOR_PREFILL_STEP: Duration = Duration::from_millis(400);
/// Rows of a chunk in the context for long prompts: enough for llama.cpp's faster ways, and few enough to change the threads
/// soon.
const SEPARATE_CHUNK: u32 = 128;
/// Threads that choose tokens by default, at most: the rows come out of one memory.
const MAX_SAMPLING_THREADS: usize = 8;

impl Engine {
    /// Loads a GGUF model and starts its decoder thread. Blocks until both are done.
    ///
    /// # Errors
    /// [`LoadError`] names each: a file that is missing, no GGUF, truncated or damaged; an architecture that llama.cpp does
    /// not know; no memory.
    pub fn load(path: impl AsRef<Path>, config: EngineConfig) -> Result<Self, LoadError> {
        Self::load_with_progress(path, config, |_| {})
    }

    /// As [`Engine::load`]; `progress` is called with the share of the weights that is loaded, 0 to 1.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_with_progress(
        path: impl AsRef<Path>,
        config: EngineConfig,
        mut progress: impl FnMut(f32),
    ) -> Result<Self, LoadError> {
        config.validate()?;
        let path = path.as_ref().to_owned();
        let (commands, receiver) = flume::bounded(config.queue_capacity as usize);
        let stop = Arc::new(AtomicBool::new(false));
        let counters = Arc::new(Counters::default());
        let (report, reports) = flume::unbounded();
        let start = Start {
            path,
            config: config.clone(),
            stop: Arc::clone(&stop),
            counters: Arc::clone(&counters),
            report,
            commands: commands.downgrade(),
        };
        let thread = std::thread::Builder::new()
            .name("decoder".to_owned())
            .spawn(move || start.run(receiver))
            .map_err(|error| LoadError::Thread(error.to_string()))?;
        let loaded = loop {
            match reports.recv() {
                Ok(Report::Progress(share)) => progress(share),
                Ok(Report::Loaded(result)) => break result,
                Err(_) => break Err(LoadError::Thread("it ended while the model was loaded".to_owned())),
            }
        };
        let (llama, threads) = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                // It has said its last word and ends; a panic was reported above.
                let _ = thread.join();
                return Err(error);
            }
        };
        Ok(Self {
            link: Link {
                commands,
                window: config.context_window,
                vocabulary: llama.vocabulary_size(),
                queue_capacity: config.queue_capacity,
                max_sequences: config.max_sequences,
                rolls_back: llama.memory_kind().rolls_back(config.keeps_sliding_window()),
            },
            model: Model { llama },
            config,
            threads,
            stop,
            counters,
            thread: Some(thread),
        })
    }

    /// The model: tokens, texts and chat templates.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What the engine was loaded with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// CPU threads a step, as of loading: with [`EngineConfig::threads`] unset, engines share the cores out.
    #[must_use]
    pub fn thread_count(&self) -> u32 {
        self.threads
    }

    /// Layers that were asked for on a GPU: all of the model's if [`EngineConfig::gpu_layers`] is unset.
    #[must_use]
    pub fn gpu_layer_count(&self) -> u32 {
        let all = self.model.layer_count() + 1;
        self.config.gpu_layers.map_or(all, |layers| layers.min(all))
    }

    /// A new sequence in a free slot. Blocks until the step under way is done.
    ///
    /// # Errors
    /// [`CreateSequenceError`] names each: all slots taken, a sampling configuration that cannot be, a full queue.
    pub fn create_sequence(&self, sampling: SamplingConfig) -> Result<Sequence, CreateSequenceError> {
        Sequence::create(sampling, self.link.clone())
    }

    /// Completes `prompt` in a sequence of its own, and streams the text. Blocks until the step under way is done, as
    /// [`Engine::create_sequence`] does, and returns when the prompt is queued.
    ///
    /// # Errors
    /// [`GenerateError`]: what [`Engine::create_sequence`], [`Model::tokenize`] or [`Sequence::decode_prompt`] find wrong
    /// before they decode. What fails later ends the generation with its reason.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Result<Generation, GenerateError> {
        Generation::start(self, prompt.into(), options)
    }

    /// Counters since the model was loaded. Never waits.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.counters.snapshot()
    }

    /// Distributions since the model was loaded. Blocks until the step under way is done. `None`: the decoder thread has
    /// ended by a panic.
    #[must_use]
    pub fn timings(&self) -> Option<Timings> {
        let (reply, timings) = flume::bounded(1);
        self.link.commands.send(Command::Timings { reply }).ok()?;
        answer(&timings, &self.link.commands).ok()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // 1. The step under way is broken off where the backend can.
        self.stop.store(true, Ordering::Relaxed);
        // 2. The decoder stops, and answers everybody who waits. An error: it has ended already.
        let _ = self.link.commands.send(Command::Shutdown);
        // 3. Its thread frees the context. The model goes with the last handle on it.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

enum Report {
    Progress(f32),
    Loaded(Result<(Arc<LlamaModel>, u32), LoadError>),
}

/// What the decoder thread begins with.
struct Start {
    path: PathBuf,
    config: EngineConfig,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
    report: Sender<Report>,
    /// For the thread that answers the decoder with commands.
    commands: WeakSender<Command>,
}

impl Start {
    fn run(self, commands: flume::Receiver<Command>) {
        let _counted = Counted::new();
        // Hyper-threads share the units that the work is done with; a container may have less than the machine.
        let cores = num_cpus::get_physical().min(num_cpus::get()).max(1) as u32;
        let threads = self.config.threads.map(std::num::NonZeroU32::get);
        let first = threads.unwrap_or_else(|| share_of_cores(cores));
        let report = self.report.clone();
        let made = LlamaModel::load(&self.path, &self.config, &mut |share| {
            // Nobody listens any more if the loading thread has panicked.
            let _ = report.send(Report::Progress(share));
        })
        .map(Arc::new)
        .and_then(|model| {
            Ok((LlamaContext::new(&model, &self.config, first, threads.unwrap_or(cores))?, model))
        });
        let (context, model) = match made {
            Ok(made) => made,
            Err(error) => {
                let _ = self.report.send(Report::Loaded(Err(error)));
                return;
            }
        };
        let setup = self.setup(&model, threads, cores);
        let prefiller = self.prefiller(&model, threads.unwrap_or(cores));
        let decoder = Decoder::new(context, setup, commands, prefiller);
        let _ = self.report.send(Report::Loaded(Ok((model, first))));
        drop(self);
        decoder.run();
    }

    /// The thread for long prompts, where one pays.
    fn prefiller(&self, model: &Arc<LlamaModel>, most_threads: u32) -> Option<Prefiller> {
        let from_threads = match self.config.prefill_context {
            PrefillContext::Auto if !model.offloaded() => LENT_THREADS,
            PrefillContext::Auto | PrefillContext::Shared => return None,
            PrefillContext::Separate => 1,
        };
        // What a state holds of other memories is less than the memory does, and with `LongRoPE` a context of another length
        // computes something else.
        let possible = model.memory_kind() == MemoryKind::Full
            && self.config.max_sequences > 1
            && !(model.long_rope() && model.unified_kv(&self.config));
        if !possible || most_threads < from_threads {
            return None;
        }
        let mut config = self.config.clone();
        config.max_sequences = 1;
        config.kv_layout = KvLayout::Unified;
        config.batch_size = config.batch_size.min(SEPARATE_CHUNK);
        config.ubatch_size = None;
        let (chunk, model) = (config.batch_size, Arc::clone(model));
        let make = move || {
            LlamaContext::new(&model, &config, most_threads, most_threads).map_err(|error| error.to_string())
        };
        Prefiller::start(make, chunk, from_threads, self.commands.clone())
            .inspect_err(|error| tracing::warn!(%error, "no thread for long prompts"))
            .ok()
    }

    fn setup(&self, model: &Arc<LlamaModel>, threads: Option<u32>, cores: u32) -> Setup {
        let config = &self.config;
        let kind = model.memory_kind();
        let rolls_back = kind.rolls_back(config.keeps_sliding_window());
        let unified = model.unified_kv(config);
        let looks_back = match kind {
            // Also where it should keep all that is before: a step that failed may have cost it that.
            MemoryKind::SlidingWindow { window } => Some(window),
            _ => None,
        };
        let usual_step = if model.offloaded() { DEVICE_PREFILL_STEP } else { PROCESSOR_PREFILL_STEP };
        let vocabulary = Arc::clone(model);
        Setup {
            limits: Limits {
                max_sequences: config.max_sequences,
                window: config.context_window,
                // In a shared buffer, llama.cpp forgets what a window still needs if a step has several ubatches.
                batch: if unified && looks_back.is_some() { config.ubatch() } else { config.batch_size },
                run_ahead: if rolls_back { config.run_ahead } else { 0 },
                straggler_window: config.straggler_window,
                prefill_step: config.prefill_step.unwrap_or(usual_step),
                kv_per_sequence: !unified,
                prefill_stretch: if config.prefill_step.is_some() { 0.0 } else { PREFILL_STRETCH },
            },
            asynchronous: model.offloaded(),
            one_state: matches!(kind, MemoryKind::Recurrent | MemoryKind::Hybrid),
            looks_back,
            // llama.cpp loses track of free cells when a step is broken off between its ubatches, and a sliding window
            // then gives up cells that are needed.
            aborts_shared: kind == MemoryKind::Full,
            threads,
            cores,
            sampling_threads: match config.sampling_threads {
                Some(threads) => threads.get() as usize,
                None if model.offloaded() => MAX_SAMPLING_THREADS.min(cores as usize),
                None => 1,
            },
            is_eog: Box::new(move |token| vocabulary.is_eog(token)),
            vocabulary_size: model.vocabulary_size() as usize,
            masks: Masks::of(model),
            stop: Arc::clone(&self.stop),
            counters: Arc::clone(&self.counters),
        }
    }
}

/// One of the engines that share the cores.
struct Counted;

impl Counted {
    fn new() -> Self {
        ENGINES.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        ENGINES.fetch_sub(1, Ordering::Relaxed);
    }
}
