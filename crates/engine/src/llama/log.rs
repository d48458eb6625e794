//! llama.cpp's log lines as `tracing` events, and the last error for error messages.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Once;

use llama_cpp_sys_2 as sys;

/// Bytes of a log line, or of an error, that are kept.
const MAX_BYTES: usize = 4096;

thread_local! {
    /// The line that is being put together: llama.cpp logs some lines in pieces.
    static LINE: RefCell<(sys::ggml_log_level, String)> = const { RefCell::new((sys::GGML_LOG_LEVEL_INFO, String::new())) };
    /// The errors since the last [`take_errors`], for a caller that wants to say why something failed.
    static ERRORS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Sends llama.cpp's log to `tracing` from now on, once for the process.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the callback lives as long as the process, and takes any text at any time from any thread.
        unsafe { sys::llama_log_set(Some(on_log), std::ptr::null_mut()) };
    });
}

/// What llama.cpp has logged as an error on this thread since the last call.
pub(super) fn take_errors() -> String {
    ERRORS.with_borrow_mut(std::mem::take)
}

unsafe extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a zero-terminated string that lives during the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A thread that is ending has no thread-local storage any more: its last words are lost, and nothing else.
    let _ = LINE.try_with(|line| {
        let Ok(mut line) = line.try_borrow_mut() else { return };
        if level != sys::GGML_LOG_LEVEL_CONT {
            line.0 = level;
        }
        for piece in text.split_inclusive('\n') {
            if line.1.len() < MAX_BYTES {
                line.1.push_str(piece.trim_end_matches('\n'));
            }
            if piece.ends_with('\n') {
                emit(line.0, &line.1);
                line.1.clear();
            }
        }
    });
}

fn emit(level: sys::ggml_log_level, line: &str) {
    match level {
        sys::GGML_LOG_LEVEL_ERROR => {
            tracing::error!(target: "llama.cpp", "{line}");
            let _ = ERRORS.try_with(|errors| {
                let Ok(mut errors) = errors.try_borrow_mut() else { return };
                if errors.len() + line.len() < MAX_BYTES {
                    if !errors.is_empty() {
                        errors.push_str("; ");
                    }
                    errors.push_str(line);
                }
            });
        }
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_INFO => tracing::debug!(target: "llama.cpp", "{line}"),
        _ => tracing::trace!(target: "llama.cpp", "{line}"),
    }
}
