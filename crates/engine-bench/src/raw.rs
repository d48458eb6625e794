//! llama.cpp without the engine: the least that a raw loop needs, safe to call. All `unsafe` of this crate is here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Once;

use llama_cpp_sys_2 as sys;

use crate::error::BenchError;
use crate::settings::{RandomSampling, Settings};

/// A token's number in the vocabulary.
pub type Token = i32;

/// Starts llama.cpp once, and sends its log to nowhere unless it is wanted on standard error.
fn start(verbose: bool) {
    static START: Once = Once::new();
    unsafe extern "C" fn discard(_: sys::ggml_log_level, _: *const c_char, _: *mut c_void) {}
    START.call_once(|| {
        if !verbose {
            // SAFETY: `discard` touches none of its arguments and lives as long as the process.
            unsafe { sys::llama_log_set(Some(discard), std::ptr::null_mut()) };
        }
        // SAFETY: it may be called at any time, and `Once` keeps it to one call.
        unsafe { sys::llama_backend_init() };
    });
}

/// Names of the devices that llama.cpp would compute on, processors last.
#[must_use]
pub fn devices() -> Vec<String> {
    // SAFETY: it takes nothing and returns the number of registered devices.
    let count = unsafe { sys::ggml_backend_dev_count() };
    (0..count)
        .map(|index| {
            // SAFETY: `index` is below the count, and a device's description is a constant C string of its backend.
            let text = unsafe {
                CStr::from_ptr(sys::ggml_backend_dev_description(sys::ggml_backend_dev_get(index)))
            };
            text.to_string_lossy().trim().to_owned()
        })
        .collect()
}

/// A loaded model, its weights mapped.
#[derive(Debug)]
pub struct Model {
    handle: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    path: PathBuf,
    /// Whether a GPU does its work.
    offloaded: bool,
}

// SAFETY: llama.cpp never changes a model after it is loaded, and any thread may free it.
unsafe impl Send for Model {}
// SAFETY: as above: all calls that this module makes on a model read it only.
unsafe impl Sync for Model {}

impl Model {
    /// Loads a GGUF file.
    ///
    /// # Errors
    /// The file is missing, or llama.cpp cannot load it.
    pub fn load(path: &Path, gpu_layers: i32, verbose: bool) -> Result<Self, BenchError> {
        let fail = |reason: String| BenchError::Model { path: path.to_owned(), reason };
        std::fs::File::open(path).map_err(|error| fail(error.to_string()))?;
        let c_path = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| fail("its name has a zero byte".to_owned()))?;
        start(verbose);
        // SAFETY: it returns a plain struct.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = gpu_layers;
        params.load_mode = sys::LLAMA_LOAD_MODE_MMAP;
        // SAFETY: the path is a C string, and no pointer in `params` is set.
        let model = unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), params) };
        let model = NonNull::new(model)
            .ok_or_else(|| fail("llama.cpp could not load it; --verbose shows its log".to_owned()))?;
        // SAFETY: the model is loaded.
        let vocab = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        let vocab = NonNull::new(vocab.cast_mut()).ok_or_else(|| fail("it has no vocabulary".to_owned()))?;
        // SAFETY: it only counts devices.
        let offloaded = gpu_layers != 0 && unsafe { sys::llama_supports_gpu_offload() };
        Ok(Self { handle: model, vocab, path: path.to_owned(), offloaded })
    }

    /// The tokens of a text, with the special ones that the model wants in front.
    ///
    /// # Errors
    /// The text is too long for llama.cpp's counters, or its vocabulary cannot spell it.
    pub fn tokenize(&self, text: &str) -> Result<Vec<Token>, BenchError> {
        let fail = |reason| BenchError::Model { path: self.path.clone(), reason };
        let length = i32::try_from(text.len()).map_err(|_| fail("the prompt is too long".to_owned()))?;
        // A token spells at least one byte, and there are at most a few special ones.
        let mut tokens = vec![0; text.len() + 8];
        // SAFETY: both buffers are as long as their lengths say, and the vocabulary lives as long as the model.
        let count = unsafe {
            sys::llama_tokenize(
                self.vocab.as_ptr(),
                text.as_ptr().cast(),
                length,
                tokens.as_mut_ptr(),
                tokens.len() as i32,
                true,
                false,
            )
        };
        let count = usize::try_from(count)
            .map_err(|_| fail(format!("llama.cpp could not tokenize the prompt (status {count})")))?;
        tokens.truncate(count);
        Ok(tokens)
    }

    /// Tokens in the vocabulary.
    #[must_use]
    pub fn vocabulary_size(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) as usize }
    }

    /// What it remembers of a sequence, as far as the layout of KV cells depends on it.
    #[must_use]
    pub fn memory_kind(&self) -> engine::MemoryKind {
        // SAFETY: the model is loaded, and the function only reads it.
        match unsafe { sys::llama_model_n_swa(self.handle.as_ptr()) } {
            0 => engine::MemoryKind::Full,
            window => engine::MemoryKind::SlidingWindow { window: window.unsigned_abs() },
        }
    }

    /// Whether a token ends a generation.
    #[must_use]
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model, and llama.cpp looks any number up in a set.
        unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: contexts borrow the model, so none is left.
        unsafe { sys::llama_model_free(self.handle.as_ptr()) }
    }
}

/// What a context is made with; everything else is as llama.cpp has it by default, and as the engine leaves it.
#[derive(Debug, Clone, Copy)]
pub struct ContextShape {
    /// Tokens of KV memory, all sequences together.
    pub n_ctx: u32,
    /// Sequences.
    pub n_seq_max: u32,
    /// Threads of a step.
    pub threads: u32,
    /// One KV buffer for all sequences, or a buffer each.
    pub kv_unified: bool,
}

impl ContextShape {
    /// The one context of all of a run's sequences, laid out as the engine does.
    #[must_use]
    pub fn shared(model: &Model, settings: &Settings) -> Self {
        Self {
            n_ctx: settings.ctx_size * settings.num_sequences,
            n_seq_max: settings.num_sequences,
            threads: settings.thread_count(),
            kv_unified: settings.engine_config().unified_kv(model.memory_kind(), model.offloaded),
        }
    }
}

/// One row of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The token to decode.
    pub token: Token,
    /// Its position in its sequence.
    pub position: i32,
    /// Its sequence.
    pub sequence: i32,
    /// Whether its logits are wanted.
    pub logits: bool,
}

/// A context, and the batch that it decodes from.
#[derive(Debug)]
pub struct Context<'m> {
    handle: NonNull<sys::llama_context>,
    batch: sys::llama_batch,
    capacity: usize,
    rows: usize,
    model: &'m Model,
}

// SAFETY: a context is not bound to the thread that made it, and every call that changes it takes `&mut self`.
unsafe impl Send for Context<'_> {}

impl<'m> Context<'m> {
    /// Makes a context.
    ///
    /// # Errors
    /// llama.cpp cannot make it, for want of memory most often.
    pub fn new(model: &'m Model, settings: &Settings, shape: ContextShape) -> Result<Self, BenchError> {
        // SAFETY: it returns a plain struct.
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = shape.n_ctx;
        params.n_batch = settings.batch_size;
        params.n_ubatch = settings.ubatch_size();
        params.n_seq_max = shape.n_seq_max;
        params.n_outputs_max = shape.n_seq_max;
        params.n_threads = shape.threads as i32;
        params.n_threads_batch = shape.threads as i32;
        params.kv_unified = shape.kv_unified;
        // SAFETY: the model is loaded and outlives the context by its lifetime; no pointer in `params` is set.
        let context = unsafe { sys::llama_init_from_model(model.handle.as_ptr(), params) };
        let context = NonNull::new(context)
            .ok_or(BenchError::Context { n_ctx: shape.n_ctx, n_seq_max: shape.n_seq_max })?;
        // SAFETY: a batch of `batch_size` rows of one sequence id each, freed with the context.
        let batch = unsafe { sys::llama_batch_init(settings.batch_size as i32, 0, 1) };
        Ok(Self { handle: context, batch, capacity: settings.batch_size as usize, rows: 0, model })
    }

    /// The model that it computes.
    #[must_use]
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Decodes one batch. It may return before the device is done; asking for logits waits for it.
    ///
    /// # Errors
    /// llama.cpp refuses or fails.
    ///
    /// # Panics
    /// On more rows than the batch holds.
    pub fn decode(&mut self, rows: &[Row]) -> Result<(), BenchError> {
        assert!(rows.len() <= self.capacity, "{} rows in a batch of {}", rows.len(), self.capacity);
        for (index, row) in rows.iter().enumerate() {
            // SAFETY: `index` is below the rows that `llama_batch_init` has allocated in each of these arrays, and each
            // row has room for one sequence id.
            unsafe {
                *self.batch.token.add(index) = row.token;
                *self.batch.pos.add(index) = row.position;
                *self.batch.n_seq_id.add(index) = 1;
                **self.batch.seq_id.add(index) = row.sequence;
                *self.batch.logits.add(index) = i8::from(row.logits);
            }
        }
        self.batch.n_tokens = rows.len() as i32;
        self.rows = rows.len();
        // SAFETY: the first `n_tokens` rows are filled in, and `&mut self` keeps other threads off the context.
        match unsafe { sys::llama_decode(self.handle.as_ptr(), self.batch) } {
            0 => Ok(()),
            status => Err(BenchError::Decode { rows: rows.len(), status }),
        }
    }

    /// Decodes a prompt in batches; logits for its last token only, at index -1.
    ///
    /// # Errors
    /// As [`Context::decode`].
    pub fn decode_prompt(&mut self, sequence: u32, prompt: &[Token]) -> Result<(), BenchError> {
        let mut rows = Vec::with_capacity(self.capacity);
        for (chunk_index, chunk) in prompt.chunks(self.capacity).enumerate() {
            rows.clear();
            rows.extend(chunk.iter().enumerate().map(|(index, &token)| {
                let position = chunk_index * self.capacity + index;
                Row {
                    token,
                    position: position as i32,
                    sequence: sequence as i32,
                    logits: position + 1 == prompt.len(),
                }
            }));
            self.decode(&rows)?;
        }
        Ok(())
    }

    /// Tokens in the vocabulary of its model.
    #[must_use]
    pub fn vocabulary_size(&self) -> usize {
        self.model.vocabulary_size()
    }

    /// Waits for the device.
    pub fn synchronize(&self) {
        // SAFETY: the context is alive.
        unsafe { sys::llama_synchronize(self.handle.as_ptr()) }
    }

    /// The logits of a row of the last batch; -1 is the last one.
    ///
    /// # Panics
    /// When the row's logits were not asked for.
    #[must_use]
    pub fn logits(&self, row: i32) -> &[f32] {
        // SAFETY: it takes any index, and answers null for one that has no logits.
        let logits = unsafe { sys::llama_get_logits_ith(self.handle.as_ptr(), row) };
        assert!(!logits.is_null(), "row {row} has no logits");
        // SAFETY: a row is as long as the vocabulary, and stays until the next decode, which takes `&mut self`.
        unsafe { std::slice::from_raw_parts(logits, self.model.vocabulary_size()) }
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: both were made in `new`, and nothing else holds them.
        unsafe {
            sys::llama_batch_free(self.batch);
            sys::llama_free(self.handle.as_ptr());
        }
    }
}

/// One of llama.cpp's sampler chains.
#[derive(Debug)]
pub struct Sampler(NonNull<sys::llama_sampler>);

// SAFETY: a chain is plain memory that is not bound to a thread, and every call that changes it takes `&mut self`.
unsafe impl Send for Sampler {}

impl Sampler {
    /// Greedy, or the chain of the contract: penalty, temperature, top-k, min-p, top-p, a seeded draw.
    ///
    /// # Panics
    /// When llama.cpp has no memory for a chain.
    #[must_use]
    pub fn new(model: &Model, sampling: &RandomSampling) -> Self {
        // SAFETY: the chain is made here, owns every sampler that is added to it, and is freed once, on drop.
        unsafe {
            let chain = sys::llama_sampler_chain_init(sys::llama_sampler_chain_default_params());
            let add = |sampler| sys::llama_sampler_chain_add(chain, sampler);
            if sampling.repetition_penalty > 1.0 {
                let vocabulary = model.vocabulary_size() as i32;
                let window = engine::PENALTY_WINDOW as i32;
                add(sys::llama_sampler_init_penalties(
                    vocabulary,
                    window,
                    sampling.repetition_penalty,
                    0.0,
                    0.0,
                ));
            }
            if sampling.temperature > 0.0 {
                add(sys::llama_sampler_init_temp(sampling.temperature));
                add(sys::llama_sampler_init_top_k(sampling.top_k as i32));
                add(sys::llama_sampler_init_min_p(sampling.min_p, 1));
                add(sys::llama_sampler_init_top_p(sampling.top_p, 1));
                add(sys::llama_sampler_init_dist(sampling.seed));
            } else {
                add(sys::llama_sampler_init_greedy());
            }
            Self(NonNull::new(chain).expect("llama.cpp allocates a chain or throws"))
        }
    }

    /// Samples from a row of the context's last batch; -1 is the last one.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn sample(&mut self, context: &Context<'_>, row: i32) -> Token {
        assert!((-1..context.rows as i32).contains(&row), "there is no row {row}");
        // SAFETY: the chain and the context are alive, the row is one of the last batch, and `llama_sampler_sample`
        // itself checks that its logits were asked for.
        unsafe { sys::llama_sampler_sample(self.0.as_ptr(), context.handle.as_ptr(), row) }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // SAFETY: made in `new`; the chain frees the samplers in it.
        unsafe { sys::llama_sampler_free(self.0.as_ptr()) }
    }
}

/// Where the largest logit is, the first one of equals.
///
/// # Panics
/// On an empty row.
#[must_use]
pub fn argmax(logits: &[f32]) -> Token {
    /// Logits whose maximum is found before one of them is looked for: so the row comes out of the memory once.
    const BLOCK: usize = 128;
    /// A lane a column, so that the compiler can keep them in vector registers.
    const LANES: usize = 16;
    let higher = |a: f32, b: f32| if b > a { b } else { a };
    let (mut start, mut best) = (0, f32::NEG_INFINITY);
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        let (chunks, rest) = block.as_chunks::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in chunks {
            for (lane, &logit) in lanes.iter_mut().zip(chunk) {
                *lane = higher(*lane, logit);
            }
        }
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] = higher(lanes[lane], lanes[lane + half]);
            }
            half /= 2;
        }
        let max = rest.iter().copied().fold(lanes[0], higher);
        if max > best {
            (start, best) = (index * BLOCK, max);
        }
    }
    let block = &logits[start..logits.len().min(start + BLOCK)];
    (start + block.iter().position(|&logit| logit >= best).expect("a row has a largest logit")) as Token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_finds_the_first_of_the_largest() {
        for length in [1, 31, 32, 33, 127, 128, 129, 1000] {
            for at in [0, length / 3, length - 1] {
                let mut logits = vec![-2.5; length];
                logits[at] = 7.0;
                logits[length - 1] = 7.0;
                assert_eq!(argmax(&logits), at as Token, "length {length}");
            }
        }
        assert_eq!(argmax(&[f32::NEG_INFINITY; 40]), 0);
    }
}
