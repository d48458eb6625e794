// Tells ThreadSanitizer what the precompiled Rust standard library synchronizes.
//
// Its generic code is compiled, and so instrumented, with the crates that use it. What is not: the slow paths of its
// locks, and fences, which ThreadSanitizer does not model. The linker puts these wrappers around them (--wrap); the build
// defines each name below as the function's mangled name. They report what the function does anyway, and hide nothing
// else: without them every contended lock and every last reference to an Arc looks like a race.

#include <cstdint>

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);

// Locks: what the last holder released at this address is acquired when the function returns. All arguments are
// pointers or small integers, passed in registers.
#define WRAP_LOCK(symbol) WRAP_LOCK_(symbol)
#define WRAP_LOCK_(symbol)                                                    \
    void* __real_##symbol(void*, void*, void*, void*);                        \
    void* __wrap_##symbol(void* self, void* a, void* b, void* c) {            \
        void* const answer = __real_##symbol(self, a, b, c);                  \
        __tsan_acquire(self);                                                 \
        return answer;                                                        \
    }

#ifdef MUTEX_LOCK
WRAP_LOCK(MUTEX_LOCK)
#endif
#ifdef RWLOCK_READ
WRAP_LOCK(RWLOCK_READ)
#endif
#ifdef RWLOCK_WRITE
WRAP_LOCK(RWLOCK_WRITE)
#endif

// Once: what its closure wrote is released to those who find it complete.
#define WRAP_ONCE(symbol) WRAP_ONCE_(symbol)
#define WRAP_ONCE_(symbol)                                                    \
    void* __real_##symbol(void*, void*, void*, void*);                        \
    void* __wrap_##symbol(void* self, void* a, void* b, void* c) {            \
        void* const answer = __real_##symbol(self, a, b, c);                  \
        __tsan_acquire(self);                                                 \
        __tsan_release(self);                                                 \
        return answer;                                                        \
    }

#ifdef ONCE_CALL
WRAP_ONCE(ONCE_CALL)
#endif

// Condition variables give the mutex, their second argument, away and take it back.
#define WRAP_CONDVAR(symbol) WRAP_CONDVAR_(symbol)
#define WRAP_CONDVAR_(symbol)                                                 \
    void* __real_##symbol(void*, void*, void*, void*);                        \
    void* __wrap_##symbol(void* self, void* mutex, void* b, void* c) {        \
        __tsan_release(mutex);                                                \
        void* const answer = __real_##symbol(self, mutex, b, c);              \
        __tsan_acquire(mutex);                                                \
        return answer;                                                        \
    }

#ifdef CONDVAR_WAIT
WRAP_CONDVAR(CONDVAR_WAIT)
#endif
#ifdef CONDVAR_WAIT_TIMEOUT
WRAP_CONDVAR(CONDVAR_WAIT_TIMEOUT)
#endif

// The last reference to an Arc is dropped by a releasing subtraction and, in the thread that finds it was the last, an
// acquiring fence. The subtraction acquires instead.
enum MemoryOrder { release = 3, acquire_release = 4 };
uint64_t __real___tsan_atomic64_fetch_sub(volatile uint64_t* at, uint64_t value, int order);
uint64_t __wrap___tsan_atomic64_fetch_sub(volatile uint64_t* at, uint64_t value, int order) {
    return __real___tsan_atomic64_fetch_sub(at, value, order == release ? acquire_release : order);
}

}  // extern "C"
