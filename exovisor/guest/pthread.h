/* POSIX threads for C and C++ modules, over `wasi:thread-spawn` and atomic waits.
 *
 *   clang --target=wasm32 -O2 -matomics -mbulk-memory -nostdlib -I DIRECTORY_OF_THIS_FILE
 *     -Wl,--no-entry,--shared-memory,--import-memory,--max-memory=BYTES x.c
 *
 * The module needs the capability `processes`. Here are threads that end by returning, normal
 * mutexes, condition variables, barriers, pthread_once and keys. There are no cancellation, no
 * pthread_exit, no timed waits and no priorities. Functions answer with 0 or an error number, as
 * in POSIX; those that cannot fail here always answer with 0.
 *
 * Threads and their stacks are static: PTHREAD_THREADS_MAX of PTHREAD_STACK_BYTES, which all files
 * of a module must define alike. A stack that is used up runs over into the next, without a trap.
 */
#ifndef EXOCELL_PTHREAD_H
#define EXOCELL_PTHREAD_H

#ifndef __wasm_atomics__
#error "threads need -matomics, and -Wl,--shared-memory,--import-memory for the linker"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Threads alive at once, beside the one that the call began with. */
#ifndef PTHREAD_THREADS_MAX
#define PTHREAD_THREADS_MAX 16
#endif
/* Bytes of a thread's stack, a multiple of 16. */
#ifndef PTHREAD_STACK_BYTES
#define PTHREAD_STACK_BYTES 65536
#endif
#define PTHREAD_KEYS_MAX 16
#define PTHREAD_DESTRUCTOR_ITERATIONS 4
#define PTHREAD_BARRIER_SERIAL_THREAD (-1)
#define PTHREAD_CREATE_JOINABLE 0
#define PTHREAD_CREATE_DETACHED 1

/* Error numbers of Linux, where no library has its own. */
#ifndef EAGAIN
#define EAGAIN 11
#endif
#ifndef EBUSY
#define EBUSY 16
#endif
#ifndef EINVAL
#define EINVAL 22
#endif
#ifndef EDEADLK
#define EDEADLK 35
#endif

/* One definition for all files that include this one. */
#define EXO_SHARED __attribute__((weak))

__attribute__((import_module("wasi"), import_name("thread-spawn"))) int exo_thread_spawn(
    void *thread);

/*  0 or EXO_GONE ──pthread_create──> EXO_JOINABLE ──it returns──> with EXO_ENDED ──pthread_join──> 0
 *                                         │                           │
 *                                   pthread_detach              pthread_detach
 *                                         v                           v
 *                                  with EXO_DETACHED ──it returns──> EXO_GONE  */
enum { EXO_JOINABLE = 1, EXO_DETACHED = 2, EXO_ENDED = 4, EXO_GONE = 7 };

/* The entry below knows the places of the first two. */
struct exo_pthread {
  char *stack_top;
  unsigned state;
  void *(*run)(void *);
  void *argument, *result;
  const void *values[PTHREAD_KEYS_MAX];
};

typedef struct exo_pthread *pthread_t;
typedef struct { int detached; } pthread_attr_t;

EXO_SHARED struct exo_pthread exo_pthreads[PTHREAD_THREADS_MAX];
EXO_SHARED __attribute__((aligned(16))) char exo_pthread_stacks[PTHREAD_THREADS_MAX]
                                                                [PTHREAD_STACK_BYTES];
/* The thread that the call began with. */
EXO_SHARED struct exo_pthread exo_pthread_first;

typedef unsigned pthread_key_t;

EXO_SHARED struct exo_pthread_key {
  unsigned is_taken;
  void (*destructor)(void *);
} exo_pthread_keys[PTHREAD_KEYS_MAX];

static inline unsigned exo_load(unsigned *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static inline void exo_store(unsigned *word, unsigned value) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static inline int exo_swap_if(unsigned *word, unsigned from, unsigned to) {
  return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Sleeps as long as the word is `value`, or until it is woken. */
static inline void exo_wait(unsigned *word, unsigned value) {
  __builtin_wasm_memory_atomic_wait32((int *)word, (int)value, -1);
}

static inline void exo_wake(unsigned *word, unsigned threads) {
  __builtin_wasm_memory_atomic_notify((int *)word, threads);
}

/* Threads. */

/* Hands the thread's values to their destructors, which may set others. */
static inline void exo_pthread_destroy(struct exo_pthread *thread) {
  for (unsigned again = 0; again < PTHREAD_DESTRUCTOR_ITERATIONS; again++)
    for (unsigned key = 0; key < PTHREAD_KEYS_MAX; key++) {
      void *value = (void *)thread->values[key];
      thread->values[key] = 0;
      if (value && exo_pthread_keys[key].destructor) exo_pthread_keys[key].destructor(value);
    }
}

EXO_SHARED void exo_pthread_run(struct exo_pthread *thread) {
  thread->result = thread->run(thread->argument);
  exo_pthread_destroy(thread);
}

/* Takes the thread's stack, runs it, adds EXO_ENDED to its state and wakes who joins. All of it in
 * assembly: compiled code may use a stack before it has one, and after the next thread has it. */
EXO_SHARED __attribute__((naked, export_name("wasi_thread_start"))) void wasi_thread_start(
    int id, struct exo_pthread *thread) {
  __asm__(
      ".globaltype __stack_pointer, i32\n"
      "local.get 1\n"
      "i32.load 0\n"
      "global.set __stack_pointer\n"
      "local.get 1\n"
      "call exo_pthread_run\n"
      "local.get 1\n"
      "i32.const 4\n"
      "i32.atomic.rmw.or 4\n"
      "drop\n"
      "local.get 1\n"
      "i32.const -1\n"
      "memory.atomic.notify 4\n"
      "drop\n"
      "return\n");
}

/* Each stack belongs to one entry of the table. */
static inline pthread_t pthread_self(void) {
  unsigned long at = (unsigned long)__builtin_frame_address(0) - (unsigned long)exo_pthread_stacks;
  unsigned long index = at / PTHREAD_STACK_BYTES;
  return index < PTHREAD_THREADS_MAX ? &exo_pthreads[index] : &exo_pthread_first;
}

static inline int pthread_equal(pthread_t one, pthread_t other) { return one == other; }

static inline int pthread_attr_init(pthread_attr_t *attr) {
  attr->detached = PTHREAD_CREATE_JOINABLE;
  return 0;
}

static inline int pthread_attr_destroy(pthread_attr_t *attr) {
  (void)attr;
  return 0;
}

static inline int pthread_attr_setdetachstate(pthread_attr_t *attr, int detached) {
  attr->detached = detached;
  return 0;
}

/* EAGAIN if all stacks are in use, or the host has no more threads for this call. */
static inline int pthread_create(pthread_t *thread, const pthread_attr_t *attr,
                                 void *(*run)(void *), void *argument) {
  unsigned state = EXO_JOINABLE | (attr && attr->detached ? EXO_DETACHED : 0);
  for (unsigned index = 0; index < PTHREAD_THREADS_MAX; index++) {
    struct exo_pthread *new_thread = &exo_pthreads[index];
    if (!exo_swap_if(&new_thread->state, 0, state) &&
        !exo_swap_if(&new_thread->state, EXO_GONE, state))
      continue;
    /* A frame's address is below the top, so that it is of this stack and not of the next. */
    new_thread->stack_top = exo_pthread_stacks[index] + PTHREAD_STACK_BYTES - 16;
    new_thread->run = run;
    new_thread->argument = argument;
    *thread = new_thread;
    if (exo_thread_spawn(new_thread) > 0) return 0;
    exo_store(&new_thread->state, 0);
    return EAGAIN;
  }
  return EAGAIN;
}

static inline int pthread_join(pthread_t thread, void **result) {
  unsigned state;
  if (thread == pthread_self()) return EDEADLK;
  while (!((state = exo_load(&thread->state)) & EXO_ENDED)) {
    if (state != EXO_JOINABLE) return EINVAL;
    exo_wait(&thread->state, state);
  }
  if (state & EXO_DETACHED) return EINVAL;
  if (result) *result = thread->result;
  exo_store(&thread->state, 0);
  return 0;
}

static inline int pthread_detach(pthread_t thread) {
  unsigned state = exo_load(&thread->state);
  do {
    if (!(state & EXO_JOINABLE) || state & EXO_DETACHED) return EINVAL;
  } while (!__atomic_compare_exchange_n(&thread->state, &state, state | EXO_DETACHED, 0,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return 0;
}

/* Mutexes: free, taken, or taken while others may wait. */

typedef struct { unsigned state; } pthread_mutex_t;
typedef struct { int unused; } pthread_mutexattr_t;
#define PTHREAD_MUTEX_INITIALIZER {0}
enum { EXO_UNLOCKED, EXO_LOCKED, EXO_WAITED_FOR };

static inline int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr) {
  (void)attr;
  exo_store(&mutex->state, EXO_UNLOCKED);
  return 0;
}

static inline int pthread_mutex_destroy(pthread_mutex_t *mutex) {
  return exo_load(&mutex->state) == EXO_UNLOCKED ? 0 : EBUSY;
}

static inline int pthread_mutex_trylock(pthread_mutex_t *mutex) {
  return exo_swap_if(&mutex->state, EXO_UNLOCKED, EXO_LOCKED) ? 0 : EBUSY;
}

static inline int pthread_mutex_lock(pthread_mutex_t *mutex) {
  if (pthread_mutex_trylock(mutex) == 0) return 0;
  while (__atomic_exchange_n(&mutex->state, EXO_WAITED_FOR, __ATOMIC_SEQ_CST) != EXO_UNLOCKED)
    exo_wait(&mutex->state, EXO_WAITED_FOR);
  return 0;
}

static inline int pthread_mutex_unlock(pthread_mutex_t *mutex) {
  if (__atomic_exchange_n(&mutex->state, EXO_UNLOCKED, __ATOMIC_SEQ_CST) == EXO_WAITED_FOR)
    exo_wake(&mutex->state, 1);
  return 0;
}

/* Condition variables: a count of signals, at whose next value a waiter wakes. */

typedef struct { unsigned signals; } pthread_cond_t;
typedef struct { int unused; } pthread_condattr_t;
#define PTHREAD_COND_INITIALIZER {0}

static inline int pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr) {
  (void)attr;
  exo_store(&cond->signals, 0);
  return 0;
}

static inline int pthread_cond_destroy(pthread_cond_t *cond) {
  (void)cond;
  return 0;
}

static inline int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex) {
  unsigned signals = exo_load(&cond->signals);
  pthread_mutex_unlock(mutex);
  exo_wait(&cond->signals, signals);
  return pthread_mutex_lock(mutex);
}

static inline int pthread_cond_signal(pthread_cond_t *cond) {
  __atomic_fetch_add(&cond->signals, 1, __ATOMIC_SEQ_CST);
  exo_wake(&cond->signals, 1);
  return 0;
}

static inline int pthread_cond_broadcast(pthread_cond_t *cond) {
  __atomic_fetch_add(&cond->signals, 1, __ATOMIC_SEQ_CST);
  exo_wake(&cond->signals, -1u);
  return 0;
}

/* Barriers: who arrives as the last of a round lets it go. */

typedef struct {
  unsigned long long arrivals;
  unsigned count, rounds;
} pthread_barrier_t;
typedef struct { int unused; } pthread_barrierattr_t;

static inline int pthread_barrier_init(pthread_barrier_t *barrier,
                                       const pthread_barrierattr_t *attr, unsigned count) {
  (void)attr;
  if (count == 0) return EINVAL;
  barrier->count = count;
  __atomic_store_n(&barrier->arrivals, 0, __ATOMIC_SEQ_CST);
  exo_store(&barrier->rounds, 0);
  return 0;
}

static inline int pthread_barrier_destroy(pthread_barrier_t *barrier) {
  return __atomic_load_n(&barrier->arrivals, __ATOMIC_SEQ_CST) % barrier->count ? EBUSY : 0;
}

/* PTHREAD_BARRIER_SERIAL_THREAD for the last one. */
static inline int pthread_barrier_wait(pthread_barrier_t *barrier) {
  unsigned long long arrival = __atomic_fetch_add(&barrier->arrivals, 1, __ATOMIC_SEQ_CST);
  unsigned round = (unsigned)(arrival / barrier->count), rounds;
  if (arrival % barrier->count == barrier->count - 1) {
    __atomic_fetch_add(&barrier->rounds, 1, __ATOMIC_SEQ_CST);
    exo_wake(&barrier->rounds, -1u);
    return PTHREAD_BARRIER_SERIAL_THREAD;
  }
  while ((int)((rounds = exo_load(&barrier->rounds)) - round) <= 0)
    exo_wait(&barrier->rounds, rounds);
  return 0;
}

/* Once: not begun, begun, done. */

typedef unsigned pthread_once_t;
#define PTHREAD_ONCE_INIT 0
enum { EXO_BEGUN = 1, EXO_DONE = 2 };

static inline int pthread_once(pthread_once_t *once, void (*run)(void)) {
  if (exo_swap_if(once, PTHREAD_ONCE_INIT, EXO_BEGUN)) {
    run();
    exo_store(once, EXO_DONE);
    exo_wake(once, -1u);
  }
  while (exo_load(once) != EXO_DONE) exo_wait(once, EXO_BEGUN);
  return 0;
}

/* Keys: each thread has a value for each. */

/* EAGAIN if all keys are taken. */
static inline int pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) {
  for (unsigned index = 0; index < PTHREAD_KEYS_MAX; index++)
    if (exo_swap_if(&exo_pthread_keys[index].is_taken, 0, 1)) {
      exo_pthread_keys[index].destructor = destructor;
      *key = index;
      return 0;
    }
  return EAGAIN;
}

/* Every thread's value is gone, without its destructor. */
static inline int pthread_key_delete(pthread_key_t key) {
  if (key >= PTHREAD_KEYS_MAX) return EINVAL;
  exo_pthread_first.values[key] = 0;
  for (unsigned index = 0; index < PTHREAD_THREADS_MAX; index++)
    exo_pthreads[index].values[key] = 0;
  exo_store(&exo_pthread_keys[key].is_taken, 0);
  return 0;
}

static inline void *pthread_getspecific(pthread_key_t key) {
  return key < PTHREAD_KEYS_MAX ? (void *)pthread_self()->values[key] : 0;
}

static inline int pthread_setspecific(pthread_key_t key, const void *value) {
  if (key >= PTHREAD_KEYS_MAX) return EINVAL;
  pthread_self()->values[key] = value;
  return 0;
}

#ifdef __cplusplus
}
#endif
#endif
