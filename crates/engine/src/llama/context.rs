//! The one `llama_context`, and the batch that feeds it.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use llama_cpp_sys_2 as sys;

use super::{LlamaModel, guard, log, throwing};
use crate::backend::{Backend, DecodeFailure, Row};
use crate::config::{EngineConfig, FlashAttention, KvType};
use crate::error::LoadError;

/// Owns a `llama_context`, and stays on the thread that made it.
pub(crate) struct LlamaContext {
    context: *mut sys::llama_context,
    memory: sys::llama_memory_t,
    batch: Batch,
    /// Boxed, since llama.cpp keeps its address.
    abort: Box<Abort>,
    outputs: usize,
    vocabulary_size: usize,
    /// KV buffers: one, or one a sequence.
    streams: usize,
    /// Threads that a step may have, and that the context has.
    threads: u32,
    set_threads: u32,
    /// Whether a device has all layers.
    on_device: bool,
    /// Its threads outlive a step: without it llama.cpp makes new ones for each.
    _pool: Option<ThreadPool>,
    /// Keeps the weights alive until the context is gone.
    _model: Arc<LlamaModel>,
}

// SAFETY: a context is not bound to the thread that made it, and every call that changes it takes `&mut self`.
unsafe impl Send for LlamaContext {}

/// Rows whose embeddings one thread looks up, which is all that the processor does of a step where a device has the
/// layers: to wake a second thread takes longer than that.
const EMBEDDINGS_A_THREAD: usize = 64;

/// The question of the decode under way, whether to give up: a `&&(dyn Fn() -> bool + Sync)`, or null.
struct Abort(*const c_void);

impl Drop for LlamaContext {
    fn drop(&mut self) {
        // SAFETY: the pointer came from llama_init_from_model and is freed once, before the model.
        unsafe { sys::llama_free(self.context) };
    }
}

impl LlamaContext {
    /// `threads`: those of the first steps; `most_threads`: what [`Backend::set_threads`] may ever ask for.
    pub(crate) fn new(
        model: &Arc<LlamaModel>,
        config: &EngineConfig,
        threads: u32,
        most_threads: u32,
    ) -> Result<Self, LoadError> {
        let mut abort = Box::new(Abort(std::ptr::null()));
        // SAFETY: it takes nothing and returns plain data.
        let mut params = unsafe { sys::llama_context_default_params() };
        // Rounded up as llama.cpp does for a buffer a sequence, so that both layouts hold as much.
        params.n_ctx = config.context_window.next_multiple_of(256) * config.max_sequences;
        params.n_batch = config.batch_size;
        params.n_ubatch = config.ubatch();
        params.n_seq_max = config.max_sequences;
        params.n_outputs_max = config.max_sequences;
        params.n_threads = threads as i32;
        params.n_threads_batch = threads as i32;
        params.kv_unified = model.unified_kv(config);
        params.swa_full = config.full_sliding_window;
        params.type_k = kv_type(config.kv_type_k);
        params.type_v = kv_type(config.kv_type_v);
        params.flash_attn_type = match config.flash_attention {
            FlashAttention::Auto => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
            FlashAttention::On => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            FlashAttention::Off => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
        params.no_perf = true;
        params.abort_callback = Some(should_abort);
        params.abort_callback_data = (&raw mut *abort).cast();

        log::take_errors();
        // SAFETY: the model is alive, and the callback's data lives as long as the context.
        let made = guard(|| unsafe { throwing::llama_init_from_model(model.as_ptr(), params) });
        let context = match made {
            Ok(context) if !context.is_null() => context,
            Ok(_) => return Err(super::refusal(config, log::take_errors())),
            Err(exception) => return Err(super::refusal(config, exception)),
        };
        // SAFETY: the context was just made.
        let memory = unsafe { sys::llama_get_memory(context) };
        let on_device =
            model.offloaded() && config.gpu_layers.is_none_or(|layers| layers > model.layer_count());
        // Each step wakes all of its threads, also those that it has no work for.
        let pool = if on_device { None } else { ThreadPool::new(most_threads) };
        if let Some(pool) = &pool {
            // SAFETY: both were just made, and the pool is freed after the context.
            unsafe { sys::llama_attach_threadpool(context, pool.0, pool.0) };
        }
        // SAFETY: the context was just made.
        let pooling = unsafe { sys::llama_pooling_type(context) };
        let made = Self {
            context,
            memory,
            batch: Batch::new(config.batch_size as usize),
            abort,
            outputs: 0,
            vocabulary_size: model.vocabulary_size() as usize,
            streams: if params.kv_unified { 1 } else { config.max_sequences as usize },
            threads,
            set_threads: threads,
            on_device,
            _pool: pool,
            _model: Arc::clone(model),
        };
        if memory.is_null() || pooling != sys::LLAMA_POOLING_TYPE_NONE {
            return Err(model.lacks("it makes embeddings"));
        }
        Ok(made)
    }
}

impl Backend for LlamaContext {
    fn decode(&mut self, rows: &[Row], abort: &(dyn Fn() -> bool + Sync)) -> Result<(), DecodeFailure> {
        self.outputs = rows.iter().filter(|row| row.output).count();
        self.batch.fill(rows);
        self.abort.0 = (&raw const abort).cast();
        let needed = if self.on_device { rows.len().div_ceil(EMBEDDINGS_A_THREAD) as u32 } else { u32::MAX };
        let threads = self.threads.min(needed).max(1);
        if self.set_threads != threads {
            self.set_threads = threads;
            // SAFETY: the context is alive, and no decode is under way.
            unsafe { sys::llama_set_n_threads(self.context, threads as i32, threads as i32) };
        }
        let (context, batch) = (self.context, self.batch.as_raw());
        // SAFETY: the batch's arrays are valid for its rows, whose tokens, slots and count the scheduler has checked;
        // `abort` outlives this call.
        let status = guard(|| unsafe { throwing::llama_decode(context, batch) });
        self.abort.0 = std::ptr::null();
        match status {
            Ok(0) => Ok(()),
            Ok(1) => Err(DecodeFailure::NoKvCells),
            Ok(2) => Err(DecodeFailure::Aborted),
            Ok(status) => Err(DecodeFailure::Failed(format!("llama_decode returned {status}"))),
            Err(exception) => Err(DecodeFailure::Thrown(exception)),
        }
    }

    fn logits(&mut self) -> &mut [f32] {
        let context = self.context;
        // SAFETY: the context is alive. The call waits for the device.
        let logits = guard(|| unsafe { throwing::llama_get_logits(context) });
        match logits {
            // SAFETY: after a decode llama.cpp holds a row of `vocabulary_size` floats for each output row, in the order
            // of the batch, until the next decode, which needs `&mut self`.
            Ok(logits) if !logits.is_null() => unsafe {
                std::slice::from_raw_parts_mut(logits, self.outputs * self.vocabulary_size)
            },
            _ => &mut [],
        }
    }

    fn synchronize(&mut self) {
        let context = self.context;
        // SAFETY: the context is alive. An exception shows again when the logits are asked for.
        drop(guard(|| unsafe { throwing::llama_synchronize(context) }));
    }

    fn positions(&self, slot: u32) -> Range<u32> {
        // SAFETY: the memory lives as long as the context, and the slot is below n_seq_max.
        let (min, max) = unsafe {
            (
                sys::llama_memory_seq_pos_min(self.memory, slot as i32),
                sys::llama_memory_seq_pos_max(self.memory, slot as i32),
            )
        };
        min.max(0) as u32..(max + 1).max(0) as u32
    }

    fn remove(&mut self, slot: u32, from: u32) -> bool {
        let memory = self.memory;
        // SAFETY: as above.
        guard(|| unsafe { throwing::llama_memory_seq_rm(memory, slot as i32, from as i32, -1) })
            .unwrap_or(false)
    }

    fn save(&mut self, slot: u32) -> Option<Vec<u8>> {
        let context = self.context;
        // SAFETY: the context is alive, and the slot is below n_seq_max.
        let size = guard(|| unsafe { throwing::llama_state_seq_get_size(context, slot as i32) }).ok()?;
        let mut state = Vec::new();
        state.try_reserve_exact(size).ok()?;
        let buffer = state.as_mut_ptr();
        // SAFETY: as above; the buffer has room for `size` bytes.
        let saved =
            guard(|| unsafe { throwing::llama_state_seq_get_data(context, buffer, size, slot as i32) })
                .ok()?;
        if saved != size || size == 0 {
            return None;
        }
        // SAFETY: that many bytes are reserved, and llama.cpp has written them all.
        unsafe { state.set_len(size) };
        of_one_stream(state, self.streams, slot as usize)
    }

    fn load(&mut self, slot: u32, state: Vec<u8>) -> bool {
        let context = self.context;
        let Some(state) = of_streams(state, self.streams) else { return false };
        let (pointer, size) = (state.as_ptr(), state.len());
        // SAFETY: the context is alive, the slot is below n_seq_max, and `state` outlives the call.
        guard(|| unsafe { throwing::llama_state_seq_set_data(context, pointer, size, slot as i32) })
            .is_ok_and(|read| read == size)
    }

    fn set_threads(&mut self, threads: u32) {
        self.threads = threads;
    }
}

/// What llama.cpp writes first into a sequence's state: a magic number and the sequence id, then the count of KV buffers. For
/// each buffer follow the count of its cells and, unless that is 0, the cells.
const STATE_HEADER: usize = 12;
const COUNT: usize = 4;

/// The state of a context with so many KV buffers, of which one holds the slot's cells, as that of a context with one.
fn of_one_stream(mut state: Vec<u8>, streams: usize, slot: usize) -> Option<Vec<u8>> {
    if streams > 1 {
        let (before, after) = (COUNT * slot, COUNT * (streams - 1 - slot));
        state.truncate(state.len().checked_sub(after)?);
        state.get_mut(STATE_HEADER - COUNT..STATE_HEADER)?.copy_from_slice(&1_u32.to_ne_bytes());
        state.drain(STATE_HEADER..STATE_HEADER + before);
    }
    Some(state)
}

/// The state of a context with one KV buffer as one that a context with so many takes for any of its sequences.
fn of_streams(mut state: Vec<u8>, streams: usize) -> Option<Vec<u8>> {
    if streams > 1 {
        state.get_mut(STATE_HEADER - COUNT..STATE_HEADER)?.copy_from_slice(&(streams as u32).to_ne_bytes());
        // Exactly, since a state is large.
        let others = COUNT * (streams - 1);
        state.try_reserve_exact(others).ok()?;
        state.resize(state.len() + others, 0);
    }
    Some(state)
}

/// Owns a pool of ggml's CPU threads.
struct ThreadPool(*mut sys::ggml_threadpool);

impl ThreadPool {
    /// `None`: there is nothing to share out, or no memory; llama.cpp then makes threads as it needs them.
    fn new(threads: u32) -> Option<Self> {
        if threads < 2 {
            return None;
        }
        // SAFETY: it takes a number and returns plain data.
        let mut params = unsafe { sys::ggml_threadpool_params_default(threads as i32) };
        // Between steps they sleep: a thread that spins takes a core from the hosts, and a laptop's battery.
        params.poll = 0;
        // SAFETY: the parameters are valid, and are read during the call only.
        let pool = guard(|| unsafe { throwing::ggml_threadpool_new(&raw mut params) }).ok()?;
        (!pool.is_null()).then_some(Self(pool))
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let pool = self.0;
        // SAFETY: it came from ggml_threadpool_new, and the context that used it is gone.
        drop(guard(|| unsafe { throwing::ggml_threadpool_free(pool) }));
    }
}

unsafe extern "C" fn should_abort(data: *mut c_void) -> bool {
    // SAFETY: `data` is the context's `Abort`; only `decode` changes it, and never while llama.cpp computes.
    let question = unsafe { &*data.cast::<Abort>() }.0;
    if question.is_null() {
        return false;
    }
    // SAFETY: it is the address of `decode`'s parameter, which is alive until llama.cpp has returned.
    let abort = unsafe { *question.cast::<&(dyn Fn() -> bool + Sync)>() };
    abort()
}

fn kv_type(kind: KvType) -> sys::ggml_type {
    match kind {
        KvType::F32 => sys::GGML_TYPE_F32,
        KvType::F16 => sys::GGML_TYPE_F16,
        KvType::Bf16 => sys::GGML_TYPE_BF16,
        KvType::Q8_0 => sys::GGML_TYPE_Q8_0,
        KvType::Q5_0 => sys::GGML_TYPE_Q5_0,
        KvType::Q4_0 => sys::GGML_TYPE_Q4_0,
    }
}

/// The arrays of a `llama_batch`, allocated once for the most rows that a step can have.
struct Batch {
    token: Vec<i32>,
    position: Vec<i32>,
    slot: Vec<i32>,
    slot_count: Vec<i32>,
    /// A pointer for each row to its entry of `slot`.
    slot_pointer: Vec<*mut i32>,
    output: Vec<i8>,
}

impl Batch {
    fn new(capacity: usize) -> Self {
        Self {
            token: Vec::with_capacity(capacity),
            position: Vec::with_capacity(capacity),
            slot_count: vec![1; capacity],
            slot_pointer: vec![std::ptr::null_mut(); capacity],
            slot: vec![0; capacity],
            output: Vec::with_capacity(capacity),
        }
    }

    fn fill(&mut self, rows: &[Row]) {
        assert!(rows.len() <= self.slot.len(), "{} rows in a batch of {}", rows.len(), self.slot.len());
        self.token.clear();
        self.position.clear();
        self.output.clear();
        for (index, row) in rows.iter().enumerate() {
            self.token.push(row.token);
            self.position.push(row.position as i32);
            self.output.push(i8::from(row.output));
            self.slot[index] = row.slot as i32;
        }
    }

    fn as_raw(&mut self) -> sys::llama_batch {
        for (pointer, slot) in self.slot_pointer.iter_mut().zip(&mut self.slot).take(self.token.len()) {
            *pointer = slot;
        }
        sys::llama_batch {
            n_tokens: self.token.len() as i32,
            token: self.token.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: self.position.as_mut_ptr(),
            n_seq_id: self.slot_count.as_mut_ptr(),
            seq_id: self.slot_pointer.as_mut_ptr(),
            logits: self.output.as_mut_ptr(),
        }
    }
}
