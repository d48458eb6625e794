//! The wall between C++ exceptions and Rust.

use std::ffi::{CStr, c_char, c_int, c_void};

unsafe extern "C" {
    fn engine_guard(
        call: unsafe extern "C-unwind" fn(*mut c_void),
        data: *mut c_void,
        buffer: *mut c_char,
        size: usize,
    ) -> c_int;
}

/// Runs `f`, which calls into llama.cpp; a C++ exception in it becomes its message.
///
/// `f` must only call functions declared as `C-unwind`, own nothing that needs dropping when it is left in the middle,
/// and not panic.
pub(crate) fn guard<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    struct Call<F, R> {
        f: Option<F>,
        result: Option<R>,
    }
    unsafe extern "C-unwind" fn run<F: FnOnce() -> R, R>(data: *mut c_void) {
        // SAFETY: `data` is the `Call<F, R>` of the frame below, which waits for this call and touches nothing meanwhile.
        let call = unsafe { &mut *data.cast::<Call<F, R>>() };
        if let Some(f) = call.f.take() {
            call.result = Some(f());
        }
    }
    fn trampoline<F: FnOnce() -> R, R>(_: &Call<F, R>) -> unsafe extern "C-unwind" fn(*mut c_void) {
        run::<F, R>
    }

    let mut call = Call { f: Some(f), result: None };
    let run = trampoline(&call);
    let mut message: [c_char; 256] = [0; 256];
    // SAFETY: `run` gets the type it was made for, `message` is writable for its length, and both outlive the call.
    let thrown = unsafe { engine_guard(run, (&raw mut call).cast(), message.as_mut_ptr(), message.len()) };
    if let (0, Some(result)) = (thrown, call.result) {
        return Ok(result);
    }
    // SAFETY: engine_guard ends what it writes with a zero byte, and the array was all zeros before.
    let message = unsafe { CStr::from_ptr(message.as_ptr()) };
    Err(message.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::guard;

    unsafe extern "C-unwind" {
        #[link_name = "_ZSt17__throw_bad_allocv"]
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        fn throw_bad_alloc();
    }

    #[test]
    fn a_value_passes_through() {
        assert_eq!(guard(|| 7), Ok(7));
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn an_exception_becomes_its_message() {
        // SAFETY: libstdc++'s function takes nothing and throws std::bad_alloc.
        let result = guard(|| unsafe { throw_bad_alloc() });
        assert_eq!(result, Err("std::bad_alloc".to_owned()));
    }
}
