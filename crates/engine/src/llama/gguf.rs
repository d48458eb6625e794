//! A look at a model file before llama.cpp loads it, so that an error can say what is wrong with it.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use llama_cpp_sys_2 as sys;

use super::{guard, log, throwing};
use crate::error::LoadError;

/// What llama.cpp does not tell of a model.
pub(super) struct Facts {
    pub(super) architecture: String,
    /// Whether it has a vector for each position that it was trained on, and none beyond.
    pub(super) learned_positions: bool,
    /// Whether llama.cpp rotates otherwise in a context that is longer than the model's original one.
    pub(super) long_rope: bool,
}

/// Checks that `path` is a GGUF file as long as its tensors need.
pub(super) fn inspect(path: &Path, c_path: &CString) -> Result<Facts, LoadError> {
    let unreadable =
        |error: std::io::Error| LoadError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(LoadError::Unreadable { path: path.to_owned(), reason: "not a file".to_owned() });
    }
    let mut magic = Vec::new();
    file.take(4).read_to_end(&mut magic).map_err(unreadable)?;
    if magic != b"GGUF" {
        return Err(LoadError::NotGguf { path: path.to_owned(), found: magic });
    }

    let damaged = |reason| LoadError::Damaged { path: path.to_owned(), reason };
    log::take_errors();
    let params = sys::gguf_init_params { no_alloc: true, ctx: std::ptr::null_mut() };
    // SAFETY: the path is zero-terminated, and with `no_alloc` and no `ctx` only the metadata is read.
    let gguf =
        guard(|| unsafe { throwing::gguf_init_from_file(c_path.as_ptr(), params) }).map_err(damaged)?;
    if gguf.is_null() {
        return Err(damaged(log::take_errors()));
    }
    let gguf = Gguf(gguf);
    let needed = gguf.bytes_needed();
    if needed > metadata.len() {
        return Err(LoadError::Truncated { path: path.to_owned(), actual: metadata.len(), needed });
    }
    let architecture = gguf
        .string("general.architecture")
        .ok_or_else(|| damaged("it has no general.architecture".to_owned()))?;
    // With more, llama.cpp ends the process.
    match gguf.number(&format!("{architecture}.block_count")) {
        Some(blocks) if !(1..=MAX_BLOCKS).contains(&blocks) => {
            return Err(damaged(format!("it has {blocks} blocks, but must have 1 to {MAX_BLOCKS}")));
        }
        _ => {}
    }
    // llama.cpp says of neither that it computes no logits.
    let bidirectional = gguf.boolean(&format!("{architecture}.attention.causal")) == Some(false);
    if bidirectional || architecture == "llama-embed" {
        let reason = "its attention is not causal";
        return Err(LoadError::NotGenerative { path: path.to_owned(), reason });
    }
    Ok(Facts {
        architecture,
        learned_positions: gguf.has_tensor(c"position_embd.weight"),
        long_rope: gguf.has_tensor(c"rope_factors_long.weight"),
    })
}

/// llama.cpp's `LLAMA_MAX_LAYERS`.
const MAX_BLOCKS: u32 = 512;

struct Gguf(*mut sys::gguf_context);

impl Drop for Gguf {
    fn drop(&mut self) {
        // SAFETY: the pointer came from gguf_init_from_file, is not null, and is freed once.
        unsafe { sys::gguf_free(self.0) };
    }
}

impl Gguf {
    /// Where the last tensor ends, in bytes from the file's begin.
    fn bytes_needed(&self) -> u64 {
        // SAFETY: the context is alive, and the ids are below gguf_get_n_tensors.
        let end = unsafe {
            (0..sys::gguf_get_n_tensors(self.0))
                .map(|id| sys::gguf_get_tensor_offset(self.0, id) + sys::gguf_get_tensor_size(self.0, id))
                .max()
        };
        // SAFETY: the context is alive.
        end.map_or(0, |end| (unsafe { sys::gguf_get_data_offset(self.0) } + end) as u64)
    }

    fn has_tensor(&self, name: &CStr) -> bool {
        // SAFETY: the context is alive and the name zero-terminated.
        unsafe { sys::gguf_find_tensor(self.0, name.as_ptr()) >= 0 }
    }

    /// The id of a key whose value has this type.
    fn find(&self, key: &str, kind: sys::gguf_type) -> Option<i64> {
        let key = CString::new(key).ok()?;
        // SAFETY: the context is alive and the key zero-terminated; the type is asked for only of a key that is there.
        unsafe {
            let id = sys::gguf_find_key(self.0, key.as_ptr());
            (id >= 0 && sys::gguf_get_kv_type(self.0, id) == kind).then_some(id)
        }
    }

    fn number(&self, key: &str) -> Option<u32> {
        // SAFETY: the context is alive, and the key's value has that type.
        self.find(key, sys::GGUF_TYPE_UINT32).map(|id| unsafe { sys::gguf_get_val_u32(self.0, id) })
    }

    fn boolean(&self, key: &str) -> Option<bool> {
        // SAFETY: as above.
        self.find(key, sys::GGUF_TYPE_BOOL).map(|id| unsafe { sys::gguf_get_val_bool(self.0, id) })
    }

    fn string(&self, key: &str) -> Option<String> {
        let id = self.find(key, sys::GGUF_TYPE_STRING)?;
        // SAFETY: the context is alive, and the key's value is a string, which is copied before the context goes.
        let value = unsafe { CStr::from_ptr(sys::gguf_get_val_str(self.0, id)) };
        Some(value.to_string_lossy().into_owned())
    }
}
