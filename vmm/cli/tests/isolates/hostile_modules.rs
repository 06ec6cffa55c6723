//! Modules that are made to cost whoever compiles them: each ends within the request's deadline
//! and memory bound, or is refused before, and nothing is left.

use std::fmt::Write as _;
use std::path::PathBuf;

use nix::sys::resource::{UsageWho, getrusage};
use tempfile::TempDir;

use crate::common::cell;
use crate::common::{Finished, eventually, exocell, run, text, unique};

/// What compiling may take with `-m 16m`: 256 MiB, and four times that; and the executable itself.
const PEAK_KIB_MAX: i64 = (256 + 4 * 16 + 128) << 10;
const BOUNDS: [&str; 4] = ["-m", "16m", "--timeout", "2s"];

fn leb(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (number & 0x7f) as u8;
        number >>= 7;
        bytes.push(if number == 0 { low } else { low | 0x80 });
        if number == 0 {
            return bytes;
        }
    }
}

fn section(id: u8, contents: &[u8]) -> Vec<u8> {
    [&[id], &leb(contents.len())[..], contents].concat()
}

/// A module with so many functions of a number, each with `locals` and this body, and a start.
fn module(functions: usize, locals: usize, body: &[u8]) -> Vec<u8> {
    let function = [&[1][..], &leb(locals), &[0x7f], body, &[0x20, 1, 0x0b]].concat();
    let function = [&leb(function.len())[..], &function].concat();
    let types = [&[2, 0x60, 1, 0x7f, 1, 0x7f, 0x60, 0, 0][..]].concat();
    let kinds = [leb(functions + 1), vec![0; functions], vec![1]].concat();
    let exports = [&[1, 6][..], b"_start", &[0], &leb(functions)].concat();
    let code = [leb(functions + 1), function.repeat(functions), vec![2, 0, 0x0b]].concat();
    let sections =
        [section(1, &types), section(3, &kinds), section(7, &exports), section(10, &code)];
    [&b"\0asm\x01\0\0\0"[..], &sections.concat()].concat()
}

/// Blocks that are left on one of `locals` and change another: the worst for a register allocator.
fn blocks(count: usize, locals: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut local = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        leb(1 + (state >> 33) as usize % locals)
    };
    let mut body = Vec::new();
    for _ in 0..count {
        let (a, b, c) = (local(), local(), local());
        for part in [
            &[0x02, 0x40, 0x20][..],
            &a,
            &[0x0d, 0, 0x20],
            &b,
            &[0x20],
            &c,
            &[0x6a, 0x21],
            &a,
            &[0x0b],
        ] {
            body.extend(part);
        }
    }
    body
}

/// Tables of branches, each with an edge to each of 5,000 blocks.
fn branches() -> Vec<u8> {
    const DEEP: usize = 5000;
    let targets: Vec<u8> = (0..=DEEP).flat_map(leb).collect();
    let table = [&[0x20, 0, 0x0e][..], &leb(DEEP), &targets].concat();
    [[0x02, 0x40].repeat(DEEP), table.repeat(60), vec![0x0b; DEEP]].concat()
}

fn file(name: &str, bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[track_caller]
fn bounded(bytes: &[u8]) -> Finished {
    let (_dir, path) = file("hostile.wasm", bytes);
    let root = TempDir::new().unwrap();
    let flags = [&["--root", text(root.path()), "run", "--rm"], &BOUNDS[..], &[text(&path)]];
    let ended = run(flags.concat());
    let peak = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    assert!(peak < PEAK_KIB_MAX, "{peak} KiB");
    assert_eq!(run(["--root", text(root.path()), "ps", "-a", "-q"]).ok().text(), "");
    ended
}

#[test]
fn what_would_take_long_is_refused_before_it_is_compiled() {
    let small = [0x41, 0, 0x28, 2, 0, 0x21, 1];
    for (what, bytes) in [
        ("bytes of one function", module(1, 3000, &blocks(160_000, 3000))),
        ("locals times blocks of one function", module(1, 3000, &blocks(45_000, 3000))),
        ("locals times blocks of one function", module(4, 500, &blocks(45_000, 500))),
        ("locals of one function", module(1, 45_000, &[])),
        ("locals of all functions", module(50_000, 15_000, &[])),
        ("functions", module(200_000, 1, &[])),
        ("blocks in blocks", module(1, 1, &[[2, 0x40].repeat(6000), vec![0x0b; 6000]].concat())),
        ("blocks of one function", module(1, 1, &[2, 0x40, 0x0b].repeat(300_000))),
        ("targets of the branch tables of one function", {
            let table = [0x02, 0x40, 0x20, 0, 0x0e, 100].into_iter().chain([0; 101]).chain([0x0b]);
            module(1, 1, &table.collect::<Vec<u8>>().repeat(1000))
        }),
        ("blocks in blocks", module(1, 1, &branches())),
    ] {
        bounded(&bytes).exited(125).complains_of(&["hostile.wasm", what, "the limit is"]);
    }
    // And what is within all of them is compiled.
    bounded(&module(20, 1, &small.repeat(10))).complains_of(&["does not compile"]);
    bounded(&module(20, 8, &blocks(100, 8))).exited(0);
}

#[test]
fn what_keeps_to_the_limits_keeps_to_the_deadline_and_to_memory_too() {
    for bytes in [
        module(30, 8, &blocks(45_000, 8)),
        module(30, 300, &blocks(20_000, 300)),
        module(1, 1, &[[0x20, 0].repeat(400_000), vec![0x6a; 399_999], vec![0x21, 1]].concat()),
        module(90_000, 20, &blocks(4, 20)),
    ] {
        let ended = bounded(&bytes);
        match ended.code {
            137 => ended.complains_of(&["the deadline passed"]),
            _ => ended.exited(125).complains_of(&["hostile.wasm", "MiB of memory", "--memory"]),
        };
    }
}

#[test]
fn text_is_read_within_the_same_bounds() {
    let mut long = "(module (func (export \"_start\")".to_owned();
    while long.len() < 16 << 20 {
        let _ = write!(long, " (drop (i32.const {}))", long.len());
    }
    let nested = format!("(module {}", "(func ".repeat(1 << 20));
    for bytes in [format!("{long}))"), nested, format!("(module (data \"{}", "a".repeat(1 << 20))] {
        let (_dir, path) = file("hostile.wat", bytes.as_bytes());
        let ended = run([&["run", "--rm"], &BOUNDS[..], &[text(&path)]].concat());
        assert!([125, 137].contains(&ended.code), "{}", ended.stderr);
        ended.complains_of(&[]);
    }
    let (_dir, path) = file("colour.wat", b"(module \x1b[31m(oops))");
    let ended = run(["run", "--rm", text(&path)]).exited(125);
    assert!(!ended.stderr.contains('\x1b'), "{}", ended.stderr);
}

#[test]
fn other_commands_that_take_modules_are_bounded_too() {
    let root = TempDir::new().unwrap();
    let (_dir, path) = file("hostile.wasm", &module(1, 3000, &blocks(45_000, 3000)));
    let add = ["--root", text(root.path()), "module", "add", "--tenant", "a", "evil", text(&path)];
    run(add).exited(125).complains_of(&["hostile.wasm", "locals times blocks"]);
    let names = run(["--root", text(root.path()), "module", "ls"]).ok();
    assert!(!names.text().contains("evil"));
    run(["caps", "explain", text(&path)]).exited(125).complains_of(&["locals times blocks"]);
    // What no worker has room for is not taken.
    let (_dir, path) = file("two.wat", b"(module (memory 1) (memory 1))");
    let add = ["--root", text(root.path()), "module", "add", "--tenant", "a", "two", text(&path)];
    run(add).exited(125).complains_of(&["two.wat", "memories of a module in a pool"]);
    // Many imports, one of them under a name that is longer than any column.
    let import = |name: &[u8]| [&[1, b'a'][..], &leb(name.len()), name, &[0, 0]].concat();
    let imports = [leb(20_000), import(&[1; 20_000]), import(b"b").repeat(19_999)].concat();
    let sections = [section(1, &[1, 0x60, 0, 0]), section(2, &imports)].concat();
    let (_dir, path) = file("long.wasm", &[&b"\0asm\x01\0\0\0"[..], &sections].concat());
    let told = run(["caps", "explain", text(&path)]).ok();
    assert!((1 << 20..8 << 20).contains(&told.text().len()), "{}", told.text().len());
    let (_dir, path) = file("name.wat", b"(module (import \"a\" \"\\1b[31mred\" (func)))");
    let told = run(["caps", "explain", text(&path)]).ok();
    assert!(told.text().contains("[31mred") && !told.text().contains('\x1b'), "{}", told.text());
}

#[test]
fn what_is_no_file_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe.wasm");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for path in [text(&path), text(dir.path()), "/dev/zero"] {
        let flags = ["run", "--rm", "--strength", "isolate", path];
        run(flags).exited(125).complains_of(&[path, "is no file"]);
    }
    let (_dir, module) = file("a.wat", b"(module (func (export \"_start\")))");
    let table = dir.path().join("table.toml");
    let grant =
        "version = 1\n[memory]\nlimit = \"16M\"\n[[model]]\nname = \"m\"\nfile = \"pipe.wasm\"\n";
    std::fs::write(&table, grant).unwrap();
    run(["run", "--rm", "--caps", text(&table), text(&module)])
        .exited(125)
        .complains_of(&["pipe.wasm", "is no file"]);
}

/// Whose code makes it: the process that compiles dies with the command.
#[test]
fn a_command_that_is_killed_leaves_no_compiler() {
    let (_dir, path) = file("slow.wasm", &module(30, 300, &blocks(20_000, 300)));
    let name = unique("slow");
    let mut command = exocell(["run", "--rm", "--name", &name, "--timeout", "60s", text(&path)]);
    let mut child = command.spawn().unwrap();
    let parent = child.id();
    let compilers = || compilers_of(parent);
    eventually("it compiles", || !compilers().is_empty());
    let known = compilers();
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("nobody compiles", || {
        known.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    });
    assert!(cell::row(&name).is_none());
}

/// The host's pids of processes that compile for `command`, whose wardens are its children.
fn compilers_of(command: u32) -> Vec<u32> {
    let field = |pid: u32, field: &str| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let found = status.lines().find_map(|line| line.strip_prefix(field)).map(str::trim);
        found.unwrap_or_default().to_owned()
    };
    let parent = |pid: u32| field(pid, "PPid:").parse::<u32>().unwrap_or(0);
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| field(*pid, "Name:") == "compile" && parent(parent(*pid)) == command)
        .collect()
}
