/* The kernels of `exocell bench parallel`. One source: sequential and parallel modules, and a
 * native program (-DNATIVE, with threads -DTHREADS) that prints the nanoseconds of a call: the
 * mean of its CPU, and the least and the mean of the clock on the wall. */
#include "exocell.h"

#ifdef THREADS
#include "native.h"
#define exo_for native_for
#endif

#ifdef NATIVE
#define KERNEL(name)
#else
#define KERNEL(name) __attribute__((export_name(name)))
#endif
#define NOINLINE __attribute__((noinline))

enum { MATRIX = 512, POINTS = 10000, DIMENSIONS = 8, CLUSTERS = 16 };

/* Large arrays lie in memory that is zero already: what is static, a parallel module must clear
 * page by page when it starts, because it does not know who made its memory. */
#ifdef NATIVE
static double heap[3 * MATRIX * MATRIX];
#else
extern char __heap_base;
#define heap ((double *)(((unsigned long)&__heap_base + 15) & ~15ul))
#endif
#define a heap
#define b (heap + MATRIX * MATRIX)
#define c (heap + 2 * MATRIX * MATRIX)
#define points heap

/* Two numbers in one register of processors and of Wasm alike. */
typedef double pair __attribute__((vector_size(16), may_alias));

static _Alignas(pair) double centres[CLUSTERS * DIMENSIONS];
/* What each part adds up, apart from those of others: processors pass whole lines, some two. */
static struct {
  _Alignas(128) double sums[CLUSTERS * DIMENSIONS];
  unsigned members[CLUSTERS];
} tallies[EXO_PARTS_MAX];

/* Numbers in [0, 1) that are the same everywhere. */
static double number(unsigned *seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return (double)(*seed >> 8) / 16777216.0;
}

static void fill(double *to, unsigned count, unsigned seed) {
  for (unsigned i = 0; i < count; i++) to[i] = number(&seed);
}

static NOINLINE void rows_of_product(void *context, unsigned begin, unsigned end, unsigned part) {
  unsigned n = *(unsigned *)context;
  (void)part;
  for (unsigned i = begin; i < end; i++) {
    for (unsigned j = 0; j < n; j++) c[i * n + j] = 0;
    for (unsigned k = 0; k < n; k++)
      for (unsigned j = 0; j < n; j++) c[i * n + j] += a[i * n + k] * b[k * n + j];
  }
}

KERNEL("matmul") int matmul(int size) {
  unsigned n = (unsigned)size;
  fill(a, n * n, 1);
  fill(b, n * n, 2);
  for (int again = 0; again < 4; again++) exo_for(rows_of_product, &n, n, 8);
  return (int)(c[n * n / 2] * 1000);
}

static NOINLINE void nearest(void *context, unsigned begin, unsigned end, unsigned part) {
  (void)context;
  for (unsigned p = begin; p < end; p++) {
    double least = 1e300;
    unsigned best = 0;
    const pair *point = (const pair *)&points[p * DIMENSIONS];
    for (unsigned k = 0; k < CLUSTERS; k++) {
      const pair *centre = (const pair *)&centres[k * DIMENSIONS];
      double far = 0;
      for (unsigned d = 0; d < DIMENSIONS / 2; d++) {
        pair way = point[d] - centre[d];
        way *= way;
        far += way[0];
        far += way[1];
      }
      if (far < least) { least = far; best = k; }
    }
    tallies[part].members[best]++;
    for (unsigned d = 0; d < DIMENSIONS; d++)
      tallies[part].sums[best * DIMENSIONS + d] += points[p * DIMENSIONS + d];
  }
}

KERNEL("kmeans") int kmeans(int count) {
  fill(points, (unsigned)count * DIMENSIONS, 3);
  fill(centres, CLUSTERS * DIMENSIONS, 4);
  for (int round = 0; round < 10; round++) {
    for (unsigned p = 0; p < EXO_PARTS_MAX; p++) {
      for (unsigned i = 0; i < CLUSTERS * DIMENSIONS; i++) tallies[p].sums[i] = 0;
      for (unsigned i = 0; i < CLUSTERS; i++) tallies[p].members[i] = 0;
    }
    unsigned parts = exo_for(nearest, 0, (unsigned)count, 512);
    for (unsigned k = 0; k < CLUSTERS; k++) {
      unsigned all = 0;
      for (unsigned p = 0; p < parts; p++) all += tallies[p].members[k];
      for (unsigned d = 0; d < DIMENSIONS && all; d++) {
        double sum = 0;
        for (unsigned p = 0; p < parts; p++) sum += tallies[p].sums[k * DIMENSIONS + d];
        centres[k * DIMENSIONS + d] = sum / all;
      }
    }
  }
  return (int)(centres[0] * 1000000);
}

struct product { unsigned n; const double *from; double *to; };

static NOINLINE void times(void *context, unsigned begin, unsigned end, unsigned part) {
  struct product *product = context;
  unsigned n = product->n;
  (void)part;
  for (unsigned i = begin; i < end; i++) {
    double sum = 0;
    /* What clang does for x86 without being asked. A short loop of many rounds ends unforeseen. */
#pragma clang loop unroll_count(4)
    for (unsigned j = 0; j < n; j++) sum += a[i * n + j] * product->from[j];
    product->to[i] = sum;
  }
}

/* The largest singular value of a symmetric matrix, by power iteration. */
KERNEL("svd") int svd(int size) {
  unsigned n = (unsigned)size;
  fill(a, n * n, 5);
  for (unsigned i = 0; i < n; i++)
    for (unsigned j = 0; j < i; j++) a[i * n + j] = a[j * n + i];
  double *v = b, *w = c, norm = 0;
  for (unsigned i = 0; i < n; i++) v[i] = 1;
  for (int round = 0; round < 50; round++) {
    struct product product = {n, v, w};
    /* A range is worth a thread from some 8,000 products on: 3 us. */
    exo_for(times, &product, n, 8000 / n + 1);
    norm = 0;
    for (unsigned i = 0; i < n; i++) norm += w[i] * w[i];
    norm = __builtin_sqrt(norm);
    for (unsigned i = 0; i < n; i++) v[i] = w[i] / norm;
  }
  return (int)(norm * 1000);
}

#ifndef NATIVE
/* A kernel several times in one isolate. */
KERNEL("often") int often(int which, int size, int times) {
  int result = 0;
  for (; times > 0; times--) result = which == 0 ? matmul(size) : which == 1 ? kmeans(size) : svd(size);
  return result;
}
#endif

#ifdef __wasm_atomics__
/* Threads, one after the other, none of which stays for the next. */
KERNEL("spawn") int spawn(int count) {
  for (int i = 0; i < count; i++) {
    exo_fork(1);
    struct exo_start *start = &exo_starts[1];
    unsigned now;
    while ((now = __atomic_load_n(&start->state, __ATOMIC_SEQ_CST)) != EXO_FREE)
      if (!exo_change(start, EXO_STAYING, EXO_NOT_NEEDED) && now < EXO_STAYING)
        __builtin_wasm_memory_atomic_wait32((int *)&start->state, (int)now, -1);
  }
  return count;
}
#endif

#ifdef NATIVE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long since(clockid_t clock, const struct timespec *from) {
  struct timespec to;
  clock_gettime(clock, &to);
  return (to.tv_sec - from->tv_sec) * 1000000000L + to.tv_nsec - from->tv_nsec;
}

int main(int count, char **words) {
  if (count != 4) return 2;
  int (*kernel)(int) = !strcmp(words[1], "matmul") ? matmul : !strcmp(words[1], "kmeans") ? kmeans : svd;
  int size = atoi(words[2]), times = atoi(words[3]), result = 0;
  long least_wall = 0;
  struct timespec cpu_from, wall_from, all_from;
  clock_gettime(CLOCK_MONOTONIC, &all_from);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_from);
  for (int i = 0; i < times; i++) {
    clock_gettime(CLOCK_MONOTONIC, &wall_from);
    result = kernel(size);
    long wall = since(CLOCK_MONOTONIC, &wall_from);
    if (!least_wall || wall < least_wall) least_wall = wall;
  }
  printf("%d %ld %ld %ld\n", result, since(CLOCK_THREAD_CPUTIME_ID, &cpu_from) / times, least_wall,
         since(CLOCK_MONOTONIC, &all_from) / times);
  return 0;
}
#endif
