/* Ordinary programs over POSIX threads, each with the number that it should come to. */
#include <pthread.h>

#define THREADS 8
#define ROUNDS 20
#define EXPORT(name) __attribute__((export_name(name)))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* Starts THREADS threads that run `run` over their numbers, and sums up what they return. */
static int sum_of_all(void *(*run)(void *)) {
  pthread_t threads[THREADS];
  long sum = 0;
  for (long number = 0; number < THREADS; number++)
    if (pthread_create(&threads[number], 0, run, (void *)number)) return -1;
  for (int number = 0; number < THREADS; number++) {
    void *result;
    if (pthread_join(threads[number], &result)) return -2;
    sum += (long)result;
  }
  return sum;
}

static void *squared(void *number) { return (void *)((long)number * (long)number); }

/* 0 + 1 + 4 + ... + 49. */
EXPORT("joined") int joined(void) { return sum_of_all(squared); }

static volatile int counter;

static void *count_up(void *number) {
  for (int again = 0; again < 2000; again++) {
    pthread_mutex_lock(&mutex);
    counter = counter + 1;
    pthread_mutex_unlock(&mutex);
  }
  return number;
}

EXPORT("counted") int counted(void) {
  return sum_of_all(count_up) == 28 ? counter : -1;
}

static pthread_barrier_t barrier;
static int arrived[ROUNDS];

/* 1 for each round in which all had arrived, 1000 for each in which it was the last. */
static void *meet(void *number) {
  long met = 0;
  (void)number;
  for (int round = 0; round < ROUNDS; round++) {
    __atomic_fetch_add(&arrived[round], 1, __ATOMIC_SEQ_CST);
    int last = pthread_barrier_wait(&barrier);
    met += __atomic_load_n(&arrived[round], __ATOMIC_SEQ_CST) == THREADS;
    if (last == PTHREAD_BARRIER_SERIAL_THREAD) met += 1000;
  }
  return (void *)met;
}

EXPORT("met") int met(void) {
  pthread_barrier_init(&barrier, 0, THREADS);
  int sum = sum_of_all(meet);
  return pthread_barrier_destroy(&barrier) ? -3 : sum;
}

static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static int turn;

static void *pong(void *unused) {
  for (int again = 0; again < ROUNDS; again++) {
    pthread_mutex_lock(&mutex);
    while (turn % 2 == 0) pthread_cond_wait(&turned, &mutex);
    turn++;
    pthread_cond_signal(&turned);
    pthread_mutex_unlock(&mutex);
  }
  return unused;
}

EXPORT("turns") int turns(void) {
  pthread_t other;
  if (pthread_create(&other, 0, pong, 0)) return -1;
  for (int again = 0; again < ROUNDS; again++) {
    pthread_mutex_lock(&mutex);
    while (turn % 2 == 1) pthread_cond_wait(&turned, &mutex);
    turn++;
    pthread_cond_broadcast(&turned);
    pthread_mutex_unlock(&mutex);
  }
  pthread_join(other, 0);
  return turn;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int begun, destroyed;

static void destroy(void *value) { __atomic_fetch_add(&destroyed, (long)value, __ATOMIC_SEQ_CST); }

static void begin(void) {
  begun++;
  pthread_key_create(&key, destroy);
}

static void *keep(void *number) {
  pthread_once(&once, begin);
  void *before = pthread_getspecific(key);
  pthread_setspecific(key, number);
  pthread_barrier_wait(&barrier);
  return (void *)(before == 0 && pthread_getspecific(key) == number ? 1L : 1000L);
}

/* 8 threads had their own values, of which the destructor had 28 in all. */
EXPORT("kept") int kept(void) {
  pthread_barrier_init(&barrier, 0, THREADS);
  int sum = sum_of_all(keep);
  int first = pthread_getspecific(key) == 0 && pthread_key_delete(key) == 0;
  return sum + 100 * begun + 1000 * destroyed + 100000 * first;
}

static void *wait_for_end(void *barrier) {
  pthread_barrier_wait(barrier);
  return 0;
}

/* How many threads there may be at once: all of them wait until the last attempt. */
EXPORT("most") int most(void) {
  static pthread_t threads[PTHREAD_THREADS_MAX];
  pthread_t other;
  int count = 0;
  pthread_barrier_init(&barrier, 0, PTHREAD_THREADS_MAX + 1);
  while (count < PTHREAD_THREADS_MAX &&
         pthread_create(&threads[count], 0, wait_for_end, &barrier) == 0)
    count++;
  if (pthread_create(&other, 0, wait_for_end, &barrier) != EAGAIN) return -1;
  pthread_barrier_wait(&barrier);
  for (int index = 0; index < count; index++)
    if (pthread_join(threads[index], 0)) return -2;
  return count;
}

static void *detach_oneself(void *unused) {
  (void)unused;
  if (pthread_detach(pthread_self()) == 0) {
    pthread_mutex_lock(&mutex);
    counter++;
    pthread_cond_signal(&turned);
    pthread_mutex_unlock(&mutex);
  }
  return 0;
}

/* Stacks of detached threads are used again, though nobody joins: more than there are, one after
 * the other. */
EXPORT("detached") int detached(void) {
  for (int number = 0; number < 3 * PTHREAD_THREADS_MAX; number++) {
    pthread_t thread;
    while (pthread_create(&thread, 0, detach_oneself, 0) == EAGAIN)
      ;
    pthread_mutex_lock(&mutex);
    while (counter <= number) pthread_cond_wait(&turned, &mutex);
    pthread_mutex_unlock(&mutex);
  }
  return counter;
}

/* What POSIX has an error number for. */
EXPORT("refused") int refused(void) {
  pthread_t thread;
  pthread_mutex_lock(&mutex);
  if (pthread_mutex_trylock(&mutex) != EBUSY || pthread_mutex_destroy(&mutex) != EBUSY) return 1;
  pthread_mutex_unlock(&mutex);
  if (pthread_mutex_trylock(&mutex) || pthread_mutex_unlock(&mutex)) return 2;
  if (pthread_barrier_init(&barrier, 0, 0) != EINVAL) return 3;
  if (pthread_join(pthread_self(), 0) != EDEADLK) return 4;
  if (pthread_create(&thread, 0, squared, 0) || pthread_join(thread, 0)) return 5;
  if (pthread_join(thread, 0) != EINVAL || pthread_detach(thread) != EINVAL) return 6;
  return 0;
}
