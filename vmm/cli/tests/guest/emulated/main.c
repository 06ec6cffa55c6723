/*
 * The first program of the emulated host, and of a guest kernel on it. On the host it
 * loads what is in /modules and starts the guest kernel with the arguments in /command;
 * in the guest it runs what /programs names, one a line. Both end with their machine.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS_MAX 64

static char *read_all(const char *path, char *text, size_t size)
{
	int file = open(path, O_RDONLY);
	ssize_t length = file < 0 ? -1 : read(file, text, size - 1);

	if (length < 0)
		return NULL;
	text[length] = 0;
	close(file);
	return text;
}

/* Runs a program to its end, and says how that was. */
static void run(char *line)
{
	char *words[WORDS_MAX] = { 0 };
	int count = 0, status = 0;
	pid_t child;

	for (char *rest, *word = strtok_r(line, " ", &rest); word && count < WORDS_MAX - 1;
	     word = strtok_r(NULL, " ", &rest))
		words[count++] = word;
	child = fork();
	if (child == 0) {
		execv(words[0], words);
		_exit(127);
	}
	/* What others leave behind comes to the first program, too */
	while (wait(&status) != child)
		;
	printf("%s ended with %d\n", words[0], WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* Loads modules in the order of their names; there are some where a test put them. */
static void load_modules(void)
{
	struct dirent **found;
	int count = scandir("/modules", &found, NULL, alphasort);

	for (int n = 0; n < count; n++) {
		const char *name = found[n]->d_name;
		char path[300];
		int file;

		if (name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/modules/%s", name);
		file = open(path, O_RDONLY);
		if (syscall(SYS_finit_module, file, "", 0) != 0)
			perror(path);
		close(file);
	}
}

int main(void)
{
	static char text[4096];
	char *lines;

	setbuf(stdout, NULL);
	/* A root that another can take the place of, which the first one is not */
	if (mount("/", "/whole", NULL, MS_BIND, NULL) == 0 && chdir("/whole") == 0 &&
	    mount(".", "/", NULL, MS_MOVE, NULL) == 0 && chroot(".") == 0)
		chdir("/");
	mount("sys", "/sys", "sysfs", 0, NULL);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	mkdir("/dev/shm", 0777);
	mount("shm", "/dev/shm", "tmpfs", 0, NULL);
	mount("tmp", "/tmp", "tmpfs", 0, NULL);
	load_modules();
	lines = read_all("/command", text, sizeof(text));
	if (!lines)
		lines = read_all("/programs", text, sizeof(text));
	for (char *rest, *line = strtok_r(lines, "\n", &rest); line;
	     line = strtok_r(NULL, "\n", &rest))
		run(line);
	sync();
	reboot(RB_POWER_OFF);
	return 1;
}
