/*
 * Many short children, one after another: each one sees what its parent, or its file, has
 * at that moment, and nothing of the ones before.
 */
#include "conform.h"

#define ROUNDS 24

/* In the program's image, so that a copy of it can say something else. */
static const volatile char marker[] = "the marker is 0";
static volatile char data[3 * PAGE];

static sigjmp_buf back;

static void on_fault(int signal)
{
	siglongjmp(back, signal);
}

/* The first byte of a page, a capital letter where it can be written; or a signal. */
static const char *look_at(volatile char *at)
{
	static char text[32];
	int signal;

	sigaction(SIGSEGV, &(struct sigaction){ .sa_handler = on_fault }, NULL);
	sigaction(SIGBUS, &(struct sigaction){ .sa_handler = on_fault }, NULL);
	text[0] = text[1] = 0;
	signal = sigsetjmp(back, 1);
	if (!signal) {
		text[0] = *at;
		*at = text[0] - 'a' + 'A';
		text[0] = *at;
	} else if (!text[0]) {
		snprintf(text, sizeof(text), "SIG%s", sigabbrev_np(signal));
	}
	return text;
}

/* A file of pages of a, b, c, ... */
static int letters(int pages)
{
	char page[PAGE];
	int fd = scratch_file();

	for (int i = 0; i < pages; i++) {
		memset(page, 'a' + i, PAGE);
		write(fd, page, PAGE);
	}
	return fd;
}

static void look_in_child(const char *what, int round, char *at)
{
	pid_t child = fork();

	if (child == 0) {
		say("%s %d: %s", what, round, look_at(at));
		_exit(0);
	}
	waitpid(child, NULL, 0);
}

/* The parent maps something else at one address before each fork. */
static void of_changed_mappings(void)
{
	int fd = letters(4), fixed = MAP_FIXED;
	char *at = mmap(NULL, PAGE, RW, ANON, -1, 0);

	for (int i = 0; i < ROUNDS; i++) {
		off_t offset = (i / 6 % 4) * PAGE;

		switch (i % 6) {
		case 0:
			mmap(at, PAGE, PROT_READ, MAP_SHARED | fixed, fd, offset);
			break;
		case 1:
			mmap(at, PAGE, PROT_READ, MAP_PRIVATE | fixed, fd, offset);
			break;
		case 2:
			mprotect(at, PAGE, RW);
			break;
		case 3:
			mprotect(at, PAGE, PROT_NONE);
			break;
		case 4:
			munmap(at, PAGE);
			break;
		case 5:
			mmap(at, PAGE, RW, ANON | fixed, -1, 0);
			*at = 'r' + i / 6;
			break;
		}
		look_in_child("mapping", i, at);
	}
}

/* The file changes, by write(), by truncation, and by growing again. */
static void of_changed_files(void)
{
	int fd = letters(2);
	char *at = mmap(NULL, 2 * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);

	for (int i = 0; i < ROUNDS; i++) {
		char letter = 'a' + i;

		switch (i % 4) {
		case 0:
		case 1:
			pwrite(fd, &letter, 1, PAGE);
			break;
		case 2:
			ftruncate(fd, PAGE);
			break;
		case 3:
			ftruncate(fd, 2 * PAGE);
			break;
		}
		look_in_child("file", i, at + PAGE);
	}
}

/* What a child writes is its own, whoever writes it next. */
static void of_written_data(void)
{
	char *heap = malloc(8 * PAGE);

	memset(heap, 'h', 8 * PAGE);
	memset((char *)data, 'd', sizeof(data));
	for (int i = 0; i < ROUNDS; i++) {
		pid_t child = fork();

		if (child == 0) {
			int right = 1;

			for (size_t at = 0; at < sizeof(data); at += PAGE / 2) {
				right &= data[at] == (i % 5 == 4 ? 'p' + i / 5 : 'd');
				data[at] = 'c';
			}
			for (size_t at = 0; at < 8 * PAGE; at += PAGE) {
				right &= heap[at] == 'h';
				heap[at] = 'c';
			}
			_exit(!right);
		}
		say_end(child);
		memset((char *)data, i % 5 == 3 ? 'p' + i / 5 : 'd', sizeof(data));
		heap[0] = 'h';
	}
}

static void copy_program(int to, char digit)
{
	static char image[4 << 20];
	int from = open("/proc/self/exe", O_RDONLY);
	ssize_t length = read(from, image, sizeof(image));
	char *at = image;

	while ((at = memmem(at, image + length - at, (const char *)marker, sizeof(marker)))) {
		at[sizeof(marker) - 2] = digit;
		at += sizeof(marker);
	}
	ftruncate(to, 0);
	pwrite(to, image, length, 0);
	close(from);
}

/* One file is executed again and again, and is another program each time. */
static void of_a_changed_program(void)
{
	char name[] = "/tmp/conform-XXXXXX";
	int fd = mkstemp(name);

	fchmod(fd, 0700);
	for (int i = 0; i < 10; i++) {
		pid_t child;

		if (fd < 0)
			fd = open(name, O_RDWR);
		copy_program(fd, '0' + i);
		close(fd);
		fd = -1;
		child = fork();
		if (child == 0) {
			execl(name, name, "marker", NULL);
			_exit(errno);
		}
		say_end(child);
	}
	unlink(name);
}

/* What main() ends with when it is told to look at the marker. */
int marker_digit(void)
{
	return marker[sizeof(marker) - 2] - '0';
}

/* A child that has a child of its own, both after others. */
static void of_children(void)
{
	data[0] = 0;
	for (int i = 0; i < ROUNDS; i++) {
		pid_t child;

		data[0] = i;
		child = fork();
		if (child == 0) {
			pid_t grandchild;
			int status;

			data[0] += 1;
			data[PAGE] = i;
			grandchild = fork();
			if (grandchild == 0)
				_exit(data[0] == i + 1 && data[PAGE] == i ? i : 99);
			data[0] = 77;
			waitpid(grandchild, &status, 0);
			_exit(WEXITSTATUS(status));
		}
		say_end(child);
	}
}

const struct fact children[] = {
	{ "children_of_changed_mappings", of_changed_mappings },
	{ "children_of_changed_files", of_changed_files },
	{ "children_of_written_data", of_written_data },
	{ "children_of_a_changed_program", of_a_changed_program },
	{ "children_of_children", of_children },
	{ NULL, NULL },
};
