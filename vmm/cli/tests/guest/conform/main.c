/* `conform` says all facts, `conform NAME` one of them. */
#include "conform.h"

#include <stdarg.h>

static const struct fact *const lists[] = { memory, signals, floats, processes, tracing, timers,
					    files, children };
static const char *current;

void say(const char *format, ...)
{
	char line[512];
	va_list arguments;
	int length = snprintf(line, sizeof(line), "%s: ", current);

	va_start(arguments, format);
	length += vsnprintf(line + length, sizeof(line) - length - 1, format, arguments);
	va_end(arguments);
	line[length++] = '\n';
	if (write(1, line, length) != length)
		_exit(9);
}

void say_call(const char *what, long result)
{
	say("%s %s", what, result == -1 ? strerrorname_np(errno) : "ok");
}

const char *status_text(int status)
{
	static char text[64];

	if (WIFEXITED(status))
		snprintf(text, sizeof(text), "exit %d", WEXITSTATUS(status));
	else if (WIFSIGNALED(status))
		snprintf(text, sizeof(text), "SIG%s", sigabbrev_np(WTERMSIG(status)));
	else if (WIFSTOPPED(status))
		snprintf(text, sizeof(text), "stopped by SIG%s event %d",
			 sigabbrev_np(WSTOPSIG(status) & 0x7f), status >> 16);
	else
		snprintf(text, sizeof(text), "continued");
	return text;
}

void say_end(pid_t child)
{
	int status;

	if (waitpid(child, &status, 0) < 0)
		say_call("waitpid", -1);
	else
		say("%s", status_text(status));
}

pid_t child_of(void (*body)(void))
{
	pid_t child = fork();

	if (child == 0) {
		body();
		_exit(0);
	}
	return child;
}

int scratch_file(void)
{
	char name[] = "/tmp/conform-XXXXXX";
	int fd = mkstemp(name);

	unlink(name);
	return fd;
}

#define SECONDS_MAX 20

/* Each fact in a process and a process group of its own, for a limited time. */
static void observe(const struct fact *fact)
{
	struct timespec limit = { SECONDS_MAX, 0 };
	int status;
	sigset_t ends;
	pid_t child;

	sigemptyset(&ends);
	sigaddset(&ends, SIGCHLD);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	current = fact->name;
	child = fork();
	if (child == 0) {
		setpgid(0, 0);
		sigprocmask(SIG_UNBLOCK, &ends, NULL);
		fact->observe();
		exit(0);
	}
	if (sigtimedwait(&ends, NULL, &limit) < 0)
		say("no end within %d s", SECONDS_MAX);
	kill(-child, SIGKILL);
	waitpid(child, &status, 0);
	/* The end of one that was killed is not the next one's. */
	while (sigtimedwait(&ends, NULL, &(struct timespec){ 0, 0 }) > 0)
		;
	if (status && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
		say("the observer ended: %s", status_text(status));
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "exit"))
		return atoi(argv[2]);
	if (argc == 2 && !strcmp(argv[1], "marker"))
		return marker_digit();
	for (size_t l = 0; l < sizeof(lists) / sizeof(*lists); l++)
		for (const struct fact *f = lists[l]; f->name; f++)
			if (argc < 2 || !strcmp(f->name, argv[1]))
				observe(f);
	return 0;
}
