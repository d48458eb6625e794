// Runs a Rust closure that calls into llama.cpp, and turns a C++ exception into a message.
#include <cstddef>
#include <cstring>
#include <exception>

static void say(char * buffer, std::size_t size, const char * what) noexcept {
    std::strncpy(buffer, what, size - 1);
    buffer[size - 1] = '\0';
}

// 0: `call` returned. 1: it threw, and `buffer` (of `size` > 0 bytes) says what.
extern "C" int engine_guard(void (*call)(void *), void * data, char * buffer, std::size_t size) noexcept {
    try {
        call(data);
        return 0;
    } catch (const std::exception & error) {
        say(buffer, size, error.what());
    } catch (...) {
        say(buffer, size, "an exception that is no std::exception");
    }
    return 1;
}
