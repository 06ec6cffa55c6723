//! Pages of an image are those of the host's page cache, and all that a program does with a file of
//! it is as with any other.

use std::fs;

use nix::fcntl::OFlag;

use crate::common::cell::{Cell, pid};
use crate::common::{Finished, IMAGE, exocell, finish, run};

const PAGES: &[u8] = include_bytes!("../guest/image/pages.py");
const VARIABLE: &str = "EXOCELL_IMAGE_PAGES";
/// Reads 50 MB of files and more of the image.
const READS: &str = "find /usr/lib /usr/bin -xdev -type f | xargs -d '\\n' cat | wc -c";

fn uses(flags: &[&str], whose: &str) -> Finished {
    let words = [&["run", "--rm", "-i"], flags, &[IMAGE, "python3", "-"]].concat();
    finish(exocell(words).env(VARIABLE, whose), PAGES)
}

#[test]
fn files_of_an_image_are_as_any_other_whoever_has_their_pages() {
    for flags in [&["--cpus", "1"][..], &["--cpus", "2"], &["--cpus", "2", "--intra", "none"]] {
        for whose in ["shared", "own"] {
            uses(flags, whose).ok();
        }
    }
}

#[test]
fn a_value_that_is_neither_is_refused() {
    uses(&[], "mine").exited(125).complains_of(&[VARIABLE, "shared or own"]);
}

fn held_bytes(cell: &Cell) -> u64 {
    let stats = run(["stats", "--no-stream", "--json", &cell.name]).ok().json();
    stats["counters"]["memory_allocated_bytes"].as_u64().expect("what the host holds")
}

#[test]
fn what_a_cell_reads_of_its_image_takes_none_of_its_memory() {
    let cell = Cell::idle("image", &["-m", "256m"]);
    let before = held_bytes(&cell);
    let read = cell.shell(READS).ok();
    let read: u64 = read.text().parse().expect("a number of bytes");
    assert!(read > 50 << 20, "{read} bytes");
    let more = held_bytes(&cell).saturating_sub(before);
    assert!(more < read / 4, "{more} bytes more are held after {read} were read");
}

#[test]
fn nobody_in_a_cell_can_write_to_the_files_of_its_image() {
    let cell = Cell::idle("image", &[]);
    let kernel = pid(&cell.inspect(), "guest_kernel_pid");
    let files = fs::read_dir(format!("/proc/{kernel}/fd")).expect("its descriptors");
    let mut of_image = 0;
    for file in files.flatten() {
        let target = fs::read_link(file.path()).unwrap_or_default();
        if target.extension().is_some_and(|end| end == "erofs") {
            let number = file.file_name();
            let info = format!("/proc/{kernel}/fdinfo/{}", number.to_string_lossy());
            let info = fs::read_to_string(info).expect("what is known of it");
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
            let flags = i32::from_str_radix(flags.trim(), 8).expect("an octal number");
            assert_eq!(flags & OFlag::O_ACCMODE.bits(), OFlag::O_RDONLY.bits(), "{info}");
            of_image += 1;
        }
    }
    assert!(of_image > 0, "the guest kernel has no file of the image");
    let maps = fs::read_to_string(format!("/proc/{kernel}/maps")).expect("its mappings");
    let mut of_image = maps.lines().filter(|line| line.ends_with(".erofs"));
    assert!(of_image.all(|line| line.contains(" r--s ")), "{maps}");
}
