/*
 * What root of a cell can take of a program that its operator starts, before the program
 * is there: `thief FILE` holds FILE, which is to be executed, by a lease, so that there is
 * time, says `ready` and looks for processes that are no program yet. It prints what
 * it took of the first one, and ends when there was one, or when FILE was executed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FDS 64
#define SECONDS 20

/* The descriptor is a pipe, a terminal or a null device, as streams are. */
static int is_stream(int fd)
{
	struct stat found;

	return fstat(fd, &found) == 0 && (S_ISFIFO(found.st_mode) || S_ISCHR(found.st_mode));
}

/* Takes each descriptor of process @pid: how many, how many of them are no streams. */
static int take(int pid, int *strange)
{
	int of = syscall(SYS_pidfd_open, pid, 0), count = 0;

	for (int fd = 0; of >= 0 && fd < FDS; fd++) {
		int got = syscall(SYS_pidfd_getfd, of, fd, 0);

		if (got < 0)
			continue;
		count++;
		*strange += !is_stream(got);
		close(got);
	}
	close(of);
	return count;
}

/* Whether process @pid may be no program yet: those of a shell's are. */
static int is_beginning(int pid)
{
	char path[64], name[32] = "";
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/comm", pid);
	fd = open(path, O_RDONLY);
	if (fd < 0)
		return 0;
	read(fd, name, sizeof(name) - 1);
	close(fd);
	return strcmp(name, "sh\n") && strcmp(name, "grep\n");
}

int main(int argc, char **argv)
{
	time_t end = time(NULL) + SECONDS;
	int known = getpid(), lease = open(argv[argc - 1], O_RDONLY);

	setvbuf(stdout, NULL, _IONBF, 0);
	signal(SIGIO, SIG_IGN);
	if (fcntl(lease, F_SETLEASE, F_WRLCK) != 0)
		return 2;
	puts("ready");
	while (time(NULL) < end) {
		for (int pid = known + 1; pid < known + 200; pid++) {
			int strange = 0, taken;

			if (!is_beginning(pid))
				continue;
			taken = take(pid, &strange);
			printf("took %d, strange %d\n", taken, strange);
			return 0;
		}
	}
	puts("nobody came");
	return 1;
}
