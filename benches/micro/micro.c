/*
 * The measuring program: `micro list` names the measurements, `micro serve` takes
 * them from standard input, one `NAME SAMPLES` a line, and answers `NAME VALUE...`
 * or `NAME error REASON`. So a driver can let several subjects take turns while
 * none of them pays for a start.
 *
 * Each request runs in a child of its own: what it does to signals, memory and
 * descriptors is gone afterwards, and one that hangs is killed.
 */
#define _GNU_SOURCE
#include "micro.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A sample lasts about this long: shorter than a host's time slice, so that
 * some samples see no other work at all. */
#define SAMPLE_NS 4000000UL
#define SAMPLES_MAX 64
#define REQUEST_SECONDS_MAX 60
/* Touched before anything is measured: the host may have to find the memory. */
#define WARM_BYTES (160UL << 20)

double ratio;
char small_file[64], big_file[64], own_copy[64];

static const struct measure *const lists[] = { calls, memory, processes, floors, bandwidth };

/* What a request's child tells its parent. */
static struct answer {
	double values[SAMPLES_MAX];
	char error[128];
	/* Per measurement, across requests: the count that fills a sample. */
	long counts[64];
} *answer;

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

void fail(const char *what)
{
	snprintf(answer->error, sizeof(answer->error), "%s%s%s", what, errno ? ": " : "",
		 errno ? strerror(errno) : "");
	_exit(1);
}

long must(long value, const char *what)
{
	if (value == -1)
		fail(what);
	return value;
}

void *must_map(void *address, size_t bytes, int protection, int flags, int fd)
{
	void *at = mmap(address, bytes, protection, flags, fd, 0);

	if (at == MAP_FAILED)
		fail("mmap");
	return at;
}

void reap(int pid)
{
	int status;

	must(waitpid(pid, &status, 0), "waitpid");
	errno = 0;
	if (status != 0)
		fail("a child failed");
}

static const struct measure *find(const char *name, int *index)
{
	*index = 0;
	for (size_t l = 0; l < sizeof(lists) / sizeof(*lists); l++)
		for (const struct measure *m = lists[l]; m->name; m++, ++*index)
			if (!strcmp(m->name, name))
				return m;
	return NULL;
}

/* The count that makes a sample long enough; the doubling also warms up. */
static long calibrate(const struct measure *m)
{
	long count = 1;

	for (;;) {
		uint64_t ns = m->run(count);

		if (ns >= SAMPLE_NS || count >= m->count_max)
			break;
		count *= ns * 4 < SAMPLE_NS ? 4 : 2;
	}
	return count < m->count_max ? count : m->count_max;
}

static double sample(const struct measure *m, long count)
{
	double ns = m->run(count);

	switch (m->kind) {
	case EACH:
		return ns / count;
	case RATE:
		return count * 1048576.0 * 1000 / ns;
	default:
		return ratio;
	}
}

static void measure(const struct measure *m, int index, int samples)
{
	alarm(REQUEST_SECONDS_MAX);
	errno = 0;
	if (!answer->counts[index])
		answer->counts[index] = calibrate(m);
	else
		m->run(answer->counts[index] / 4 + 1);
	for (int s = 0; s < samples; s++)
		answer->values[s] = sample(m, answer->counts[index]);
	_exit(0);
}

/* Runs one request in a child and prints its line. */
static void serve_one(const char *name, int samples)
{
	int index, status;
	const struct measure *m = find(name, &index);

	if (!m || samples < 1 || samples > SAMPLES_MAX) {
		printf("%s error not a request\n", name);
		return;
	}
	answer->error[0] = 0;
	pid_t child = fork();
	if (child == 0)
		measure(m, index, samples);
	if (child < 0 || waitpid(child, &status, 0) < 0) {
		printf("%s error fork: %s\n", name, strerror(errno));
	} else if (WIFSIGNALED(status)) {
		printf("%s error killed by signal %d\n", name, WTERMSIG(status));
	} else if (status) {
		printf("%s error %s\n", name, answer->error);
	} else {
		printf("%s", name);
		for (int s = 0; s < samples; s++)
			printf(" %.3f", answer->values[s]);
		printf("\n");
	}
}

/* The files that measurements use: data in memory where there is a tmpfs. */
static void prepare_files(void)
{
	const char *folder = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
	static char block[1 << 20];
	int from, to;
	ssize_t got;

	snprintf(small_file, sizeof(small_file), "%s/micro-%d-small", folder, getpid());
	snprintf(big_file, sizeof(big_file), "%s/micro-%d-big", folder, getpid());
	snprintf(own_copy, sizeof(own_copy), "/tmp/micro-%d", getpid());
	to = must(open(small_file, O_CREAT | O_WRONLY | O_TRUNC, 0600), small_file);
	must(write(to, block, PAGE), small_file);
	close(to);
	memset(block, 'x', sizeof(block));
	to = must(open(big_file, O_CREAT | O_WRONLY | O_TRUNC, 0600), big_file);
	for (size_t done = 0; done < FILE_BYTES; done += sizeof(block))
		must(write(to, block, sizeof(block)), big_file);
	close(to);
	from = must(open("/proc/self/exe", O_RDONLY), "/proc/self/exe");
	to = must(open(own_copy, O_CREAT | O_WRONLY | O_TRUNC, 0700), own_copy);
	while ((got = must(read(from, block, sizeof(block)), "read")) > 0)
		must(write(to, block, got), own_copy);
	close(to);
	close(from);
}

static void remove_files(void)
{
	unlink(small_file);
	unlink(big_file);
	unlink(own_copy);
}

static void warm_memory(void)
{
	char *at = must_map(NULL, WARM_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1);

	for (size_t i = 0; i < WARM_BYTES; i += PAGE)
		at[i] = 1;
	munmap(at, WARM_BYTES);
}

static int serve(void)
{
	char line[128], name[64];
	int samples;

	answer = mmap(NULL, sizeof(*answer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
		      -1, 0);
	if (answer == MAP_FAILED)
		return 1;
	/* A failure of what follows ends in fail(): its text is for standard error. */
	pid_t child = fork();
	if (child == 0) {
		warm_memory();
		_exit(0);
	}
	reap(child);
	prepare_files();
	atexit(remove_files);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%63s %d", name, &samples) != 2)
			continue;
		serve_one(name, samples);
		fflush(stdout);
	}
	return 0;
}

static int list(void)
{
	static const char *const units[] = { "ns", "MB/s", "x" };

	for (size_t l = 0; l < sizeof(lists) / sizeof(*lists); l++)
		for (const struct measure *m = lists[l]; m->name; m++)
			printf("%s %s %d\n", m->name, units[m->kind], m->cpus);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "exit"))
		_exit(0);
	if (argc == 2 && !strcmp(argv[1], "list"))
		return list();
	if (argc == 2 && !strcmp(argv[1], "serve"))
		return serve();
	fprintf(stderr, "usage: micro list|serve\n");
	return 2;
}
