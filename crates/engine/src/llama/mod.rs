//! llama.cpp, and the only unsafe code of this crate.
//!
//! Functions of llama.cpp that can throw are declared here as `C-unwind` and called through [`guard()`], so that an
//! exception ends as an `Err` and never unwinds into Rust code that does not expect it.

use crate::config::EngineConfig;
use crate::error::LoadError;

mod context;
mod gguf;
mod guard;
mod log;
mod model;

pub(crate) use context::LlamaContext;
pub(crate) use guard::guard;
pub(crate) use model::LlamaModel;

/// llama.cpp has refused a model or a context, and says why.
fn refusal(config: &EngineConfig, reason: String) -> LoadError {
    let said = reason.to_lowercase();
    if said.contains("alloc") || said.contains("memory") {
        let (sequences, context_window) = (config.max_sequences, config.context_window);
        LoadError::OutOfMemory { sequences, context_window, reason }
    } else {
        LoadError::Refused { reason }
    }
}

/// llama.cpp's functions that can throw. The crate's own bindings declare them as not unwinding.
mod throwing {
    use std::ffi::c_char;

    use llama_cpp_sys_2 as sys;

    unsafe extern "C-unwind" {
        pub(super) fn llama_backend_init();
        pub(super) fn llama_model_load_from_file(
            path: *const c_char,
            params: sys::llama_model_params,
        ) -> *mut sys::llama_model;
        pub(super) fn llama_init_from_model(
            model: *mut sys::llama_model,
            params: sys::llama_context_params,
        ) -> *mut sys::llama_context;
        pub(super) fn llama_decode(context: *mut sys::llama_context, batch: sys::llama_batch) -> i32;
        pub(super) fn llama_synchronize(context: *mut sys::llama_context);
        pub(super) fn llama_get_logits(context: *mut sys::llama_context) -> *mut f32;
        pub(super) fn llama_memory_seq_rm(memory: sys::llama_memory_t, slot: i32, from: i32, to: i32)
        -> bool;
        pub(super) fn llama_state_seq_get_size(context: *mut sys::llama_context, slot: i32) -> usize;
        pub(super) fn llama_state_seq_get_data(
            context: *mut sys::llama_context,
            state: *mut u8,
            size: usize,
            slot: i32,
        ) -> usize;
        pub(super) fn llama_state_seq_set_data(
            context: *mut sys::llama_context,
            state: *const u8,
            size: usize,
            slot: i32,
        ) -> usize;
        pub(super) fn llama_tokenize(
            vocabulary: *const sys::llama_vocab,
            text: *const c_char,
            text_len: i32,
            tokens: *mut i32,
            n_tokens_max: i32,
            add_special: bool,
            parse_special: bool,
        ) -> i32;
        pub(super) fn llama_token_to_piece(
            vocabulary: *const sys::llama_vocab,
            token: i32,
            buffer: *mut c_char,
            length: i32,
            lstrip: i32,
            special: bool,
        ) -> i32;
        pub(super) fn llama_chat_apply_template(
            template: *const c_char,
            messages: *const sys::llama_chat_message,
            count: usize,
            add_assistant: bool,
            buffer: *mut c_char,
            length: i32,
        ) -> i32;
        pub(super) fn ggml_threadpool_new(
            params: *mut sys::ggml_threadpool_params,
        ) -> *mut sys::ggml_threadpool;
        pub(super) fn ggml_threadpool_free(pool: *mut sys::ggml_threadpool);
        pub(super) fn gguf_init_from_file(
            path: *const c_char,
            params: sys::gguf_init_params,
        ) -> *mut sys::gguf_context;
    }
}
