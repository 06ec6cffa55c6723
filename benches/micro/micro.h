/* What the measurements share. One static program runs in every subject. */
#ifndef MICRO_H
#define MICRO_H

#include <stdint.h>
#include <stddef.h>

#define PAGE 4096UL

/* How a measurement's value comes from a count and the time it took. */
enum kind {
	EACH,	/* nanoseconds for each of the counted things */
	RATE,	/* the counted things are MiB: megabytes a second */
	RATIO,	/* the measurement stores the value itself, in `ratio` */
};

struct measure {
	const char *name;
	enum kind kind;
	/* Processors that it needs. */
	int cpus;
	/* The most things that make sense in one sample. */
	long count_max;
	/* Does `count` things; the nanoseconds that they alone took. */
	uint64_t (*run)(long count);
};

/* Each file ends its list with an entry without a name. */
extern const struct measure calls[], memory[], processes[], floors[], bandwidth[];

/* What a RATIO measurement found. */
extern double ratio;
/* A small file and one of FILE_BYTES, both in the page cache; a copy of this program. */
extern char small_file[], big_file[], own_copy[];
#define FILE_BYTES (64UL << 20)

uint64_t now_ns(void);
/* Ends the measurement with a reason, and errno's text where it is set. */
_Noreturn void fail(const char *what);
/* `value` of a call that gives -1 on failure. */
long must(long value, const char *what);
void *must_map(void *address, size_t bytes, int protection, int flags, int fd);
/* Waits for a child, which must end with status 0. */
void reap(int pid);

#endif
