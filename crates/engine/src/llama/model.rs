//! A loaded model and its vocabulary.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Once;

use llama_cpp_sys_2 as sys;

use super::{gguf, guard, log, refusal, throwing};
use crate::config::{EngineConfig, KvLayout, SplitMode};
use crate::error::{ChatTemplateError, ConfigError, LoadError, TokenizeError};
use crate::model::{ChatMessage, MemoryKind, Token};

/// Owns a `llama_model`.
pub(crate) struct LlamaModel {
    model: *mut sys::llama_model,
    vocabulary: *const sys::llama_vocab,
    vocabulary_size: u32,
    offloaded: bool,
    long_rope: bool,
    path: PathBuf,
}

// SAFETY: llama.cpp never changes a model after it is loaded; it may be used and freed from any thread.
unsafe impl Send for LlamaModel {}
// SAFETY: every function called on a shared `LlamaModel` takes it as const and is documented as thread-safe (tokenizing)
// or only reads plain data.
unsafe impl Sync for LlamaModel {}

impl Drop for LlamaModel {
    fn drop(&mut self) {
        // SAFETY: the pointer came from llama_model_load_from_file, and is freed once: contexts made from it hold a
        // reference to this object.
        unsafe { sys::llama_model_free(self.model) };
    }
}

impl LlamaModel {
    pub(crate) fn load(
        path: &Path,
        config: &EngineConfig,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, LoadError> {
        static BACKEND: Once = Once::new();
        log::install();
        // SAFETY: it may be called at any time, and is called once.
        BACKEND.call_once(|| drop(guard(|| unsafe { throwing::llama_backend_init() })));

        let c_path =
            path.to_str().and_then(|path| CString::new(path).ok()).ok_or_else(|| LoadError::Unreadable {
                path: path.to_owned(),
                reason: "the path is not UTF-8 without zero bytes".to_owned(),
            })?;
        let gguf::Facts { architecture, learned_positions, long_rope } = gguf::inspect(path, &c_path)?;

        let mut progress = progress;
        // SAFETY: it takes nothing and returns plain data.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = config.gpu_layers.map_or(-1, |layers| layers.min(i32::MAX as u32) as i32);
        params.main_gpu = config.main_device as i32;
        params.split_mode = match config.split_mode {
            SplitMode::None => sys::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => sys::LLAMA_SPLIT_MODE_LAYER,
            SplitMode::Row => sys::LLAMA_SPLIT_MODE_ROW,
        };
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();

        log::take_errors();
        // SAFETY: the path is zero-terminated, and the callback's data outlives the call.
        let loaded = guard(|| unsafe { throwing::llama_model_load_from_file(c_path.as_ptr(), params) });
        let model = match loaded {
            Ok(model) if !model.is_null() => model,
            Ok(_) => return Err(why(path, config, architecture, log::take_errors())),
            Err(exception) => return Err(why(path, config, architecture, exception)),
        };
        // SAFETY: the model is loaded; the vocabulary lives as long as it does.
        let model = unsafe {
            let vocabulary = sys::llama_model_get_vocab(model);
            let vocabulary_size = sys::llama_vocab_n_tokens(vocabulary).max(0) as u32;
            let offloaded = config.gpu_layers != Some(0) && has_gpu();
            Self { model, vocabulary, vocabulary_size, offloaded, long_rope, path: path.to_owned() }
        };
        // SAFETY: the model is loaded, and each function only reads it.
        unsafe {
            let trained = sys::llama_model_n_ctx_train(model.model).max(0) as u32;
            let no_vocabulary = sys::llama_vocab_type(model.vocabulary) == sys::LLAMA_VOCAB_TYPE_NONE;
            if learned_positions && config.context_window > trained {
                let (value, max) = (config.context_window.into(), trained.into());
                Err(ConfigError::OutOfRange { name: "context_window", value, min: 8, max }.into())
            } else if model.vocabulary_size == 0 || no_vocabulary {
                Err(model.lacks("it has no vocabulary"))
            } else if !sys::llama_model_has_decoder(model.model) || sys::llama_model_has_encoder(model.model)
            {
                Err(model.lacks("it is not a decoder-only model"))
            } else if sys::llama_model_is_diffusion(model.model) {
                Err(model.lacks("it is a diffusion model"))
            } else {
                Ok(model)
            }
        }
    }

    pub(super) fn lacks(&self, reason: &'static str) -> LoadError {
        LoadError::NotGenerative { path: self.path.clone(), reason }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::llama_model {
        self.model
    }

    /// Whether a context's length changes what the model computes.
    pub(crate) fn long_rope(&self) -> bool {
        self.long_rope
    }

    /// Whether all sequences share one KV buffer. llama.cpp counts that as one long context, and may forget there what a window
    /// needs, which a hybrid model can have as well.
    pub(crate) fn unified_kv(&self, config: &EngineConfig) -> bool {
        // SAFETY: the model is loaded, and the function only reads it.
        let has_window = unsafe { sys::llama_model_n_swa(self.model) } > 0;
        config.unified_kv(self.memory_kind(), self.offloaded)
            && (config.kv_layout == KvLayout::Unified || !(self.long_rope || has_window))
    }

    /// Whether layers are on a GPU, so that a decode may return before it is done.
    pub(crate) fn offloaded(&self) -> bool {
        self.offloaded
    }

    pub(crate) fn vocabulary_size(&self) -> u32 {
        self.vocabulary_size
    }

    pub(crate) fn memory_kind(&self) -> MemoryKind {
        // SAFETY: the model is loaded, and each function only reads it.
        unsafe {
            if sys::llama_model_is_hybrid(self.model) {
                MemoryKind::Hybrid
            } else if sys::llama_model_is_recurrent(self.model) {
                MemoryKind::Recurrent
            } else {
                match sys::llama_model_n_swa(self.model) {
                    0 => MemoryKind::Full,
                    window => MemoryKind::SlidingWindow { window: window.max(0) as u32 },
                }
            }
        }
    }

    pub(crate) fn layer_count(&self) -> u32 {
        // SAFETY: the model is loaded, and the function only reads it.
        unsafe { sys::llama_model_n_layer(self.model) }.max(0) as u32
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        // SAFETY: as above.
        unsafe { sys::llama_model_size(self.model) }
    }

    pub(crate) fn parameter_count(&self) -> u64 {
        // SAFETY: as above.
        unsafe { sys::llama_model_n_params(self.model) }
    }

    pub(crate) fn description(&self) -> String {
        let mut buffer: [c_char; 128] = [0; 128];
        // SAFETY: the buffer is writable for its length, and is always ended with a zero byte.
        unsafe {
            sys::llama_model_desc(self.model, buffer.as_mut_ptr(), buffer.len());
            CStr::from_ptr(buffer.as_ptr()).to_string_lossy().into_owned()
        }
    }

    /// Whether `token` may be asked about at all.
    pub(crate) fn knows(&self, token: Token) -> bool {
        u32::try_from(token).is_ok_and(|token| token < self.vocabulary_size)
    }

    fn check(&self, token: Token) -> Result<(), TokenizeError> {
        if self.knows(token) {
            Ok(())
        } else {
            Err(TokenizeError::UnknownToken { token, vocabulary: self.vocabulary_size })
        }
    }

    pub(crate) fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the token is in the vocabulary, which is alive.
        self.knows(token) && unsafe { sys::llama_vocab_is_eog(self.vocabulary, token) }
    }

    /// Whether a completion must never hold `token`: it is a control token, unknown or unused.
    pub(crate) fn is_special(&self, token: Token) -> bool {
        let never =
            sys::LLAMA_TOKEN_ATTR_CONTROL | sys::LLAMA_TOKEN_ATTR_UNKNOWN | sys::LLAMA_TOKEN_ATTR_UNUSED;
        // SAFETY: the token is in the vocabulary, which is alive.
        self.knows(token) && unsafe { sys::llama_vocab_get_attr(self.vocabulary, token) } & never != 0
    }

    pub(crate) fn tokenize(
        &self,
        text: &[u8],
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, TokenizeError> {
        const MAX: usize = i32::MAX as usize / 2;
        if text.len() > MAX {
            return Err(TokenizeError::TooLong { bytes: text.len(), max: MAX });
        }
        // Where one is missing, llama.cpp ends the process.
        // SAFETY: the vocabulary is alive.
        let missing = add_special
            && unsafe {
                let vocabulary = self.vocabulary;
                (sys::llama_vocab_get_add_bos(vocabulary) && sys::llama_vocab_bos(vocabulary) < 0)
                    || (sys::llama_vocab_get_add_eos(vocabulary) && sys::llama_vocab_eos(vocabulary) < 0)
                    || (sys::llama_vocab_get_add_sep(vocabulary) && sys::llama_vocab_sep(vocabulary) < 0)
            };
        if missing {
            let reason =
                "the model's file asks for a BOS, EOS or SEP token that its vocabulary does not have";
            return Err(TokenizeError::Failed(reason.to_owned()));
        }
        let run = |tokens: &mut Vec<Token>| {
            let (data, room) = (tokens.as_mut_ptr(), tokens.len() as i32);
            // SAFETY: text and tokens are valid for their lengths, and the vocabulary is alive.
            guard(|| unsafe {
                throwing::llama_tokenize(
                    self.vocabulary,
                    text.as_ptr().cast(),
                    text.len() as i32,
                    data,
                    room,
                    add_special,
                    parse_special,
                )
            })
            .map_err(TokenizeError::Failed)
        };
        // A token is at least a byte, but for those that the model adds at the ends, and a space before.
        let mut tokens = vec![0; text.len() + 8];
        let mut count = run(&mut tokens)?;
        if count < 0 && count != i32::MIN {
            tokens.resize(count.unsigned_abs() as usize, 0);
            count = run(&mut tokens)?;
        }
        let count = usize::try_from(count)
            .map_err(|_| TokenizeError::Failed("more tokens than its counters reach".to_owned()))?;
        tokens.truncate(count);
        // A text that begins with the BOS token's own text, as rendered templates do, must not get a second one.
        // SAFETY: the vocabulary is alive.
        let bos = unsafe { sys::llama_vocab_bos(self.vocabulary) };
        if add_special && bos >= 0 && tokens.starts_with(&[bos, bos]) {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// Appends a token's bytes to `bytes`; those of control tokens only if `special`.
    pub(crate) fn append_piece(
        &self,
        token: Token,
        special: bool,
        bytes: &mut Vec<u8>,
    ) -> Result<(), TokenizeError> {
        self.check(token)?;
        let start = bytes.len();
        let mut room = 64;
        loop {
            bytes.resize(start + room, 0);
            let (data, length) = (bytes[start..].as_mut_ptr(), room as i32);
            // SAFETY: the buffer is writable for its length, and the token is in the vocabulary.
            let written = guard(|| unsafe {
                throwing::llama_token_to_piece(self.vocabulary, token, data.cast(), length, 0, special)
            });
            match written {
                Ok(written) if written >= 0 => {
                    bytes.truncate(start + written as usize);
                    return Ok(());
                }
                Ok(needed) if needed.unsigned_abs() as usize > room => room = needed.unsigned_abs() as usize,
                Ok(_) => {
                    bytes.truncate(start);
                    return Ok(());
                }
                Err(exception) => {
                    bytes.truncate(start);
                    return Err(TokenizeError::Failed(exception));
                }
            }
        }
    }

    fn chat_template(&self) -> *const c_char {
        // SAFETY: the model is loaded; a null name asks for the default template, which lives as long as the model.
        unsafe { sys::llama_model_chat_template(self.model, std::ptr::null()) }
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        !self.chat_template().is_null()
    }

    pub(crate) fn apply_chat_template(
        &self,
        messages: &[ChatMessage<'_>],
        add_assistant: bool,
    ) -> Result<Vec<u8>, ChatTemplateError> {
        let template = self.chat_template();
        if template.is_null() {
            return Err(ChatTemplateError::None);
        }
        let zero_byte = |_| ChatTemplateError::Failed("a message holds a zero byte".to_owned());
        let texts = messages
            .iter()
            .map(|message| {
                Ok((
                    CString::new(message.role).map_err(zero_byte)?,
                    CString::new(message.content).map_err(zero_byte)?,
                ))
            })
            .collect::<Result<Vec<_>, ChatTemplateError>>()?;
        let chat: Vec<_> = texts
            .iter()
            .map(|(role, content)| sys::llama_chat_message { role: role.as_ptr(), content: content.as_ptr() })
            .collect();
        let mut bytes =
            vec![0_u8; 256 + 2 * texts.iter().map(|(r, c)| r.count_bytes() + c.count_bytes()).sum::<usize>()];
        loop {
            let (data, room) = (bytes.as_mut_ptr(), i32::try_from(bytes.len()).unwrap_or(i32::MAX));
            // SAFETY: template and messages are zero-terminated and outlive the call; the buffer is writable for `room`.
            let written = guard(|| unsafe {
                throwing::llama_chat_apply_template(
                    template,
                    chat.as_ptr(),
                    chat.len(),
                    add_assistant,
                    data.cast(),
                    room,
                )
            })
            .map_err(ChatTemplateError::Failed)?;
            match usize::try_from(written) {
                Ok(length) if length <= bytes.len() => {
                    bytes.truncate(length);
                    return Ok(bytes);
                }
                Ok(length) => bytes.resize(length, 0),
                Err(_) => {
                    return Err(ChatTemplateError::Failed(
                        "llama.cpp does not know this template".to_owned(),
                    ));
                }
            }
        }
    }
}

unsafe extern "C" fn on_progress(progress: f32, data: *mut c_void) -> bool {
    // SAFETY: `data` points to the `&mut dyn FnMut(f32)` of `load`, which waits for the call that calls this.
    let progress_fn = unsafe { &mut *data.cast::<&mut dyn FnMut(f32)>() };
    progress_fn(progress);
    true
}

fn has_gpu() -> bool {
    // SAFETY: the backends are loaded, and the indices are below the count.
    unsafe {
        (0..sys::ggml_backend_dev_count()).any(|index| {
            let kind = sys::ggml_backend_dev_type(sys::ggml_backend_dev_get(index));
            kind == sys::GGML_BACKEND_DEVICE_TYPE_GPU || kind == sys::GGML_BACKEND_DEVICE_TYPE_IGPU
        })
    }
}

/// The error for a model that llama.cpp would not load, from what it said.
fn why(path: &Path, config: &EngineConfig, architecture: String, reason: String) -> LoadError {
    if reason.contains("unknown model architecture") {
        LoadError::UnknownArchitecture { path: path.to_owned(), architecture }
    } else {
        match refusal(config, reason) {
            // A choice of device that there is not is no fault of the file.
            LoadError::Refused { reason } if !reason.contains("main_gpu") => {
                LoadError::Damaged { path: path.to_owned(), reason }
            }
            error => error,
        }
    }
}
