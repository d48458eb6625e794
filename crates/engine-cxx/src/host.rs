//! What one C++ engine object holds. Calls come from any thread.
//!
//! No lock is held while a model decodes, other than the one of the sequence that it decodes for: the map of sequences is
//! only looked into, and the loaded model is taken out of its place before it is dropped. Unloading drops the engine,
//! which ends what its sequences have in flight; they find themselves shut down.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use engine::{
    Canceller, ChatMessage, Engine, EngineConfig, Model, PromptError, SampleError, SamplingConfig, Sequence,
};

use crate::bridge::ffi;
use crate::pieces;

/// The state behind one `CotabbyInferenceEngine`.
#[derive(Default)]
pub struct Host {
    /// Held while a model is loaded or unloaded, so that these happen one after another.
    loading: Mutex<()>,
    model: RwLock<Option<Arc<LoadedModel>>>,
    last_error: Mutex<String>,
}

struct LoadedModel {
    /// The first field, so that it is dropped before the sequences and ends what they have in flight.
    engine: Engine,
    path: Vec<u8>,
    options: ffi::Options,
    sequences: Mutex<HashMap<i32, Arc<Slot>>>,
}

struct Slot {
    /// Apart from the sequence, which is locked while it decodes.
    canceller: Canceller,
    /// `None` after it was destroyed, for calls that were waiting for it.
    sequence: Mutex<Option<Sequence>>,
    model: Weak<LoadedModel>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sequence that takes part in a call, or why there is none.
enum Lookup {
    Found(Arc<Slot>),
    Unknown,
    NotLoaded,
}

impl Host {
    /// Loads a model unless it is loaded with the same options. What is wrong with the arguments alone leaves the loaded
    /// model where it is.
    pub fn load_model(&self, path: &[u8], options: &ffi::Options) -> ffi::Status {
        let _loading = lock(&self.loading);
        let config = match engine_config(options) {
            Ok(config) => config,
            Err(error) => return self.fail(error, ffi::Status::Error),
        };
        if self.model().is_some_and(|loaded| loaded.path == path && loaded.options == *options) {
            return ffi::Status::Ok;
        }
        drop(self.take_model());
        match Engine::load(path_from_bytes(path), config) {
            Ok(engine) => {
                let loaded = LoadedModel {
                    engine,
                    path: path.to_vec(),
                    options: options.clone(),
                    sequences: Mutex::default(),
                };
                *self.model.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(loaded));
                ffi::Status::Ok
            }
            Err(error) => self.fail(error, ffi::Status::Error),
        }
    }

    /// Ends what is in flight and frees the model. The last call that still reads from it does the freeing.
    pub fn unload_model(&self) {
        let _loading = lock(&self.loading);
        drop(self.take_model());
    }

    /// Whether there is a model.
    pub fn is_model_loaded(&self) -> bool {
        self.with_model(|_| true).unwrap_or(false)
    }

    /// What was loaded; zeros without a model.
    pub fn loaded(&self) -> ffi::Loaded {
        self.with_model(|loaded| {
            let config = loaded.engine.config();
            ffi::Loaded {
                context_window_tokens: config.context_window as i32,
                batch_size: config.batch_size as i32,
                thread_count: loaded.engine.thread_count() as i32,
                gpu_layers: loaded.engine.gpu_layer_count() as i32,
                max_sequences: config.max_sequences as i32,
            }
        })
        .unwrap_or_default()
    }

    /// Counters of the loaded engine; zeros without a model.
    pub fn metrics(&self) -> ffi::Metrics {
        let Some(loaded) = self.model() else { return ffi::Metrics::default() };
        let metrics = loaded.engine.metrics();
        ffi::Metrics {
            steps: metrics.steps,
            rows: metrics.rows,
            decode_steps: metrics.decode_steps,
            decode_rows: metrics.decode_rows,
            sampled: metrics.sampled,
            discarded: metrics.discarded,
            decode_failures: metrics.decode_failures,
            step_seconds: metrics.step_time.as_secs_f64(),
        }
    }

    /// Why the latest call that failed did.
    pub fn last_error(&self) -> String {
        lock(&self.last_error).clone()
    }

    /// The tokens of a text; none without a model.
    pub fn tokenize(&self, text: &[u8], add_special: bool, parse_special: bool) -> Vec<i32> {
        let Some(model) = self.text_model() else { return Vec::new() };
        model.tokenize(text, add_special, parse_special).unwrap_or_else(|error| self.fail(error, Vec::new()))
    }

    /// A token as it is shown; empty for an unknown one.
    pub fn token_text(&self, token: i32) -> Vec<u8> {
        let Some(model) = self.text_model() else { return Vec::new() };
        model.token_text(token).unwrap_or_else(|error| self.fail(error, Vec::new()))
    }

    /// A token's exact bytes; empty for an unknown one.
    pub fn token_piece(&self, token: i32) -> Vec<u8> {
        let Some(model) = self.text_model() else { return Vec::new() };
        model.token_piece(token).unwrap_or_else(|error| self.fail(error, Vec::new()))
    }

    /// Whether the model has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.text_model().is_some_and(|model| model.has_chat_template())
    }

    /// A system and a user turn as the model wants them; empty where that fails.
    pub fn apply_chat_template(&self, system: Option<&[u8]>, user: &[u8], add_assistant: bool) -> Vec<u8> {
        let Some(model) = self.text_model() else { return Vec::new() };
        let (Ok(system), Ok(user)) = (system.map(str::from_utf8).transpose(), str::from_utf8(user)) else {
            return self.fail("a chat message must be UTF-8", Vec::new());
        };
        let system = system.map(|content| ChatMessage { role: "system", content });
        let messages: Vec<_> =
            system.into_iter().chain([ChatMessage { role: "user", content: user }]).collect();
        model
            .apply_chat_template(&messages, add_assistant)
            .unwrap_or_else(|error| self.fail(error, Vec::new()))
    }

    /// The id of a new sequence, or -1.
    pub fn create_sequence(&self, sampling: &ffi::Sampling) -> i32 {
        let Some(loaded) = self.model() else { return self.fail("no model is loaded", -1) };
        let mut sequence = match loaded.engine.create_sequence(sampling_config(sampling)) {
            Ok(sequence) => sequence,
            Err(error) => return self.fail(error, -1),
        };
        let Ok(id) = i32::try_from(sequence.id()) else {
            return self.fail("this process has used up its sequence ids", -1);
        };
        // Hosts of the first API get log-probabilities unless they turn them off.
        sequence.set_compute_logprob(true);
        let slot = Slot {
            canceller: sequence.canceller(),
            sequence: Mutex::new(Some(sequence)),
            model: Arc::downgrade(&loaded),
        };
        lock(&loaded.sequences).insert(id, Arc::new(slot));
        id
    }

    /// Frees a sequence, after what it has in flight has been cancelled.
    pub fn destroy_sequence(&self, id: i32) {
        let removed = self.with_model(|loaded| lock(&loaded.sequences).remove(&id)).flatten();
        if let Some(slot) = removed {
            slot.canceller.cancel();
            drop(lock(&slot.sequence).take());
        }
    }

    /// Decodes a prompt and samples the first token after it.
    pub fn decode_prompt(&self, id: i32, tokens: &[i32], start_position: i32) -> ffi::Status {
        let slot = match self.slot(id) {
            Lookup::Found(slot) => slot,
            Lookup::Unknown => {
                return self.fail(format_args!("there is no sequence {id}"), ffi::Status::Error);
            }
            Lookup::NotLoaded => return ffi::Status::NotLoaded,
        };
        if slot.canceller.is_cancelled() {
            return ffi::Status::Cancelled;
        }
        let Ok(start) = u32::try_from(start_position) else {
            return self.fail(format_args!("a prompt cannot start at {start_position}"), ffi::Status::Error);
        };
        let mut sequence = lock(&slot.sequence);
        let Some(sequence) = sequence.as_mut() else {
            return self.fail(format_args!("sequence {id} was destroyed"), ffi::Status::Error);
        };
        match sequence.decode_prompt(tokens, start) {
            Ok(()) => ffi::Status::Ok,
            Err(PromptError::Cancelled) => ffi::Status::Cancelled,
            Err(PromptError::Shutdown) => ffi::Status::NotLoaded,
            // A step that the unloading aborted may be reported as one that failed.
            Err(_) if slot.model.strong_count() == 0 => ffi::Status::NotLoaded,
            Err(error) => self.fail(error, ffi::Status::Error),
        }
    }

    /// The next token of a sequence.
    pub fn sample_next(&self, id: i32) -> ffi::Sample {
        let Lookup::Found(slot) = self.slot(id) else { return ffi::Sample::ENDED };
        let mut sequence = lock(&slot.sequence);
        let Some(sequence) = sequence.as_mut() else { return ffi::Sample::ENDED };
        let sample = match sequence.sample_next() {
            Ok(sample) => sample,
            Err(SampleError::Cancelled) => {
                return ffi::Sample { is_eos: false, was_cancelled: true, ..ffi::Sample::ENDED };
            }
            Err(SampleError::Shutdown) => return ffi::Sample::ENDED,
            Err(error) => return self.fail(error, ffi::Sample::ENDED),
        };
        // The model may have been unloaded since the token was sampled.
        let Some(loaded) = slot.model.upgrade() else { return ffi::Sample::ENDED };
        match loaded.engine.model().token_text(sample.token) {
            Ok(text) => ffi::Sample {
                token: sample.token,
                piece: pieces::keep(&text),
                is_eos: sample.is_eog,
                was_cancelled: false,
                logprob: sample.logprob,
                argmax_is_eog: sample.argmax_is_eog,
            },
            Err(error) => self.fail(error, ffi::Sample::ENDED),
        }
    }

    /// Keeps the first positions of a sequence; false where nothing was changed.
    pub fn trim(&self, id: i32, keep_positions: i32) -> bool {
        let Ok(keep) = u32::try_from(keep_positions) else {
            return self.fail(format_args!("a sequence cannot be cut to {keep_positions} positions"), false);
        };
        let trimmed = self.with_sequence(id, |sequence| sequence.trim(keep));
        match trimmed {
            Some(Ok(())) => true,
            Some(Err(error)) => self.fail(error, false),
            None => false,
        }
    }

    /// Positions that a sequence holds; 0 for an unknown one.
    pub fn position_count(&self, id: i32) -> i32 {
        self.with_sequence(id, Sequence::position_count).unwrap_or(0) as i32
    }

    /// Whether the next completion must go on with the current word.
    pub fn set_force_word_continuation(&self, id: i32, enabled: bool) {
        self.with_sequence(id, |sequence| sequence.set_force_word_continuation(enabled));
    }

    /// Whether log-probabilities are computed.
    pub fn set_compute_logprob(&self, id: i32, enabled: bool) {
        self.with_sequence(id, |sequence| sequence.set_compute_logprob(enabled));
    }

    /// Cancels a sequence without waiting for anything that it does.
    pub fn cancel_sequence(&self, id: i32) {
        self.with_model(|loaded| {
            if let Some(slot) = lock(&loaded.sequences).get(&id) {
                slot.canceller.cancel();
            }
        });
    }

    /// The model, kept alive for a call that may take a while. Such a call may turn out to be the one that frees it.
    fn model(&self) -> Option<Arc<LoadedModel>> {
        self.model.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The model's texts, for a call that may take a while: unloading ends the engine meanwhile.
    fn text_model(&self) -> Option<Model> {
        self.with_model(|loaded| loaded.engine.model().clone())
    }

    /// For calls that are over at once, and so never have to free the model.
    fn with_model<T>(&self, call: impl FnOnce(&LoadedModel) -> T) -> Option<T> {
        self.model.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(call)
    }

    fn take_model(&self) -> Option<Arc<LoadedModel>> {
        self.model.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn slot(&self, id: i32) -> Lookup {
        match self.with_model(|loaded| lock(&loaded.sequences).get(&id).cloned()) {
            Some(Some(slot)) => Lookup::Found(slot),
            Some(None) => Lookup::Unknown,
            None => Lookup::NotLoaded,
        }
    }

    fn with_sequence<T>(&self, id: i32, call: impl FnOnce(&mut Sequence) -> T) -> Option<T> {
        let Lookup::Found(slot) = self.slot(id) else { return None };
        lock(&slot.sequence).as_mut().map(call)
    }

    pub(crate) fn fail<T>(&self, error: impl Display, answer: T) -> T {
        *lock(&self.last_error) = error.to_string();
        answer
    }
}

fn engine_config(options: &ffi::Options) -> Result<EngineConfig, String> {
    let within = |name: &str, value: i32, min: i32, max: i32| {
        u32::try_from(value)
            .ok()
            .filter(|_| (min..=max).contains(&value))
            .ok_or_else(|| format!("{name} is {value}, but must be {min} to {max}"))
    };
    let mut config = EngineConfig::default();
    config.max_sequences = within("max_sequences", options.max_sequences, 1, engine::MAX_SEQUENCES as i32)?;
    let window = i32::MAX / options.max_sequences;
    config.context_window = within("context_window_tokens", options.context_window_tokens, 8, window)?;
    config.batch_size = within("batch_size", options.batch_size, 1, 1 << 20)?.max(config.max_sequences);
    config.gpu_layers = u32::try_from(options.gpu_layers).ok();
    config.threads = NonZeroU32::new(within("thread_count", options.thread_count, 0, 512)?);
    config.run_ahead = within("run_ahead_tokens", options.run_ahead_tokens, 0, engine::MAX_RUN_AHEAD as i32)?;
    Ok(config)
}

/// Numbers beyond what the engine takes mean the same as its limit. What is not a number is the engine's to refuse.
fn sampling_config(sampling: &ffi::Sampling) -> SamplingConfig {
    let mut config = SamplingConfig::default();
    config.max_prediction_tokens = sampling.max_prediction_tokens.max(0) as u32;
    config.temperature = sampling.temperature.clamp(0.0, 100.0);
    config.top_k = sampling.top_k.max(0) as u32;
    config.top_p = sampling.top_p.clamp(0.0, 1.0);
    config.min_p = sampling.min_p.clamp(0.0, 1.0);
    config.repetition_penalty = sampling.repetition_penalty.clamp(0.0, 100.0);
    config.seed = sampling.seed;
    config.single_line = sampling.single_line;
    config
}

#[cfg(unix)]
fn path_from_bytes(path: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    OsString::from_vec(path.to_vec()).into()
}

#[cfg(not(unix))]
fn path_from_bytes(path: &[u8]) -> PathBuf {
    OsString::from(String::from_utf8_lossy(path).into_owned()).into()
}
