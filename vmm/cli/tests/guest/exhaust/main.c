/*
 * Takes memory until the guest kernel has none left: usage: exhaust WAY.
 *
 * WAY is anonymous, tables, slab or forks. What takes it has a pid namespace of its
 * own, so that its end gives everything back, and is the first that the OOM killer
 * is to choose. Prints "oom" and exits with 0 once that killer
 * has acted; exits with 1 where the memory never ran out.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
/* What one table of pages maps. */
#define TABLE (2 * MIB)
/* What one of many processes takes. */
#define SHARE (2 * MIB)
#define FILES 1000

static void fail(const char *what)
{
	perror(what);
	_exit(1);
}

/* A figure of /proc/vmstat, without taking memory for it. */
static long kills(void)
{
	static char text[1 << 14];
	int fd = open("/proc/vmstat", O_RDONLY);
	ssize_t got, all = 0;
	char *line;

	while ((got = read(fd, text + all, sizeof(text) - 1 - all)) > 0)
		all += got;
	close(fd);
	text[all] = '\0';
	line = strstr(text, "\noom_kill ");
	return line ? atol(line + 10) : -1;
}

static void prefer(const char *score)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY);

	if (fd < 0 || write(fd, score, strlen(score)) < 0)
		fail("oom_score_adj");
	close(fd);
}

/* Its own code stays: reading it again and again is what makes the end slow. */
static void stay(void)
{
	if (mlockall(MCL_CURRENT))
		fail("mlockall");
}

static char *map(size_t bytes)
{
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		fail("mmap");
	return at;
}

static void some_anonymous(void)
{
	memset(map(SHARE), 1, SHARE);
}

/* Reading maps the one page of zeros: what grows are the tables. */
static void some_tables(void)
{
	volatile char *at = map(SHARE / PAGE * TABLE);

	for (size_t i = 0; i < SHARE / PAGE; i++)
		(void)at[i * TABLE];
}

/* A pair is some kilobytes. */
static void some_slab(void)
{
	int pair[2];

	for (size_t i = 0; i < FILES / 2; i++)
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
			break;
}

/*
 * Process after process takes its share. None is large: what the OOM killer ends
 * is gone before it looks for the next, which would be a program of others. None
 * ends by itself; to go on forking then can keep all others from their memory.
 */
static void with_forks(void (*take_share)(void))
{
	for (;;) {
		pid_t child = fork();

		if (child == 0) {
			stay();
			take_share();
			for (;;)
				pause();
		}
		if (waitpid(-1, NULL, WNOHANG) > 0)
			_exit(0);
		usleep(child < 0 ? 10000 : 0);
	}
}

static void anonymous(void)
{
	for (;;)
		some_anonymous();
}

static void tables(void)
{
	with_forks(some_tables);
}

static void slab(void)
{
	with_forks(some_slab);
}

/* Each has two children, which do the same. */
static void bomb(void)
{
	some_anonymous();
	for (int i = 0; i < 2; i++)
		if (fork() == 0) {
			some_anonymous();
			i = -1;
		}
	for (;;)
		pause();
}

static void (*way(const char *name))(void)
{
	static const struct {
		const char *name;
		void (*take)(void);
	} ways[] = {
		{ "anonymous", anonymous }, { "tables", tables }, { "slab", slab },
		{ "forks", bomb },
	};

	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		if (!strcmp(ways[i].name, name))
			return ways[i].take;
	return NULL;
}

int main(int argc, char **argv)
{
	void (*take)(void) = way(argc > 1 ? argv[1] : "");
	long before = kills();
	pid_t child;
	int status;

	if (!take)
		return 2;
	prefer("-1000");
	stay();
	if (before < 0 || unshare(CLONE_NEWPID))
		fail("unshare");
	child = fork();
	if (child == 0) {
		prefer("1000");
		stay();
		take();
		_exit(1);
	}
	/* To ask for the figure takes memory, too. */
	while (waitpid(child, &status, WNOHANG) == 0 && kills() == before)
		usleep(10000);
	kill(child, SIGKILL);
	while (waitpid(child, &status, 0) == child)
		;
	if (kills() == before)
		return 1;
	puts("oom");
	return 0;
}
