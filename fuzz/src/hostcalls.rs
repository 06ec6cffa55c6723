//! Calls of the host by a module: any function of WASI preview 1 and of its sockets, with words,
//! structures and paths of anyone's choice, in a folder that may be written.
//!
//! An input is a byte that says how many calls there are, calls of [`CALL_BYTES`] from the second
//! such block on, and what they point to. The module finds it at [`INPUT`] in its memory.

use exocell_exovisor::{
    Admission, Arrived, Call, CallLimits, Connection, Done, Function, Metering, Network,
    NetworkError, Policy, Pool, Priority, Scheduler, SchedulerConfig, Spec, Tenant,
};
use exocell_xgate::{CapabilitySet, Protocol, Table};
use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const TENANT: &str = "fuzz";
/// Where the input lies in the module's memory; below it is room for results.
const INPUT: u32 = 1024;
/// No input is longer, in bytes; a pipe holds as much.
const INPUT_BYTES: usize = 16 << 10;
/// A call's bytes: which one, and its words from [`WORDS`] on, eight bytes each.
const CALL_BYTES: usize = 80;
const WORDS: usize = 8;
/// What waits is ended after this.
const DEADLINE: Duration = Duration::from_millis(10);
/// Lies beside the folder.
const SECRET: &str = "what no module sees";

/// Names, and parameters: `i` of 32 bits, `l` of 64. Each answers with an errno.
const CALLS: [(&str, &str); 55] = [
    ("args_get", "ii"),
    ("args_sizes_get", "ii"),
    ("environ_get", "ii"),
    ("environ_sizes_get", "ii"),
    ("clock_res_get", "ii"),
    ("clock_time_get", "ili"),
    ("proc_raise", "i"),
    ("random_get", "ii"),
    ("sock_accept", "iii"),
    ("sock_recv", "iiiiii"),
    ("sock_send", "iiiii"),
    ("sock_shutdown", "ii"),
    ("poll_oneoff", "iiii"),
    ("fd_advise", "illi"),
    ("fd_allocate", "ill"),
    ("fd_close", "i"),
    ("fd_datasync", "i"),
    ("fd_fdstat_get", "ii"),
    ("fd_fdstat_set_flags", "ii"),
    ("fd_fdstat_set_rights", "ill"),
    ("fd_filestat_get", "ii"),
    ("fd_filestat_set_size", "il"),
    ("fd_filestat_set_times", "illi"),
    ("fd_pread", "iiili"),
    ("fd_prestat_get", "ii"),
    ("fd_prestat_dir_name", "iii"),
    ("fd_pwrite", "iiili"),
    ("fd_read", "iiii"),
    ("fd_readdir", "iiili"),
    ("fd_renumber", "ii"),
    ("fd_seek", "ilii"),
    ("fd_sync", "i"),
    ("fd_tell", "ii"),
    ("fd_write", "iiii"),
    ("path_create_directory", "iii"),
    ("path_filestat_get", "iiiii"),
    ("path_filestat_set_times", "iiiilli"),
    ("path_link", "iiiiiii"),
    ("path_open", "iiiiillii"),
    ("path_readlink", "iiiiii"),
    ("path_remove_directory", "iii"),
    ("path_rename", "iiiiii"),
    ("path_symlink", "iiiii"),
    ("path_unlink_file", "iii"),
    ("sock_open", "iii"),
    ("sock_bind", "iii"),
    ("sock_listen", "ii"),
    ("sock_connect", "iii"),
    ("sock_recv_from", "iiiiiiii"),
    ("sock_send_to", "iiiiiii"),
    ("sock_getaddrinfo", "iiiiiiii"),
    ("sock_getpeeraddr", "iiii"),
    ("sock_getlocaladdr", "iiii"),
    ("sock_getsockopt", "iiiii"),
    ("sock_setsockopt", "iiiii"),
];

/// Reads its standard input, and makes the calls that are in there.
fn module() -> String {
    let import = |(name, words): &(&str, &str)| {
        let types: String =
            words.chars().map(|word| if word == 'i' { " i32" } else { " i64" }).collect();
        format!(
            "(import \"wasi_snapshot_preview1\" \"{name}\" (func ${name} (param{types}) (result i32)))\n"
        )
    };
    let imports: String = CALLS.iter().map(import).collect();
    let labels: Vec<String> = (0..CALLS.len()).map(|index| format!("$c{index}")).collect();
    let opened: String = labels.iter().rev().map(|label| format!("(block {label} ")).collect();
    let branch = |(name, words): &(&str, &str)| {
        let load = |(at, word): (usize, char)| {
            let bits = if word == 'i' { 32 } else { 64 };
            format!("(i{bits}.load offset={} (local.get $call))", WORDS + 8 * at)
        };
        let arguments: String = words.chars().enumerate().map(load).collect();
        format!(") (drop (call ${name} {arguments})) (br $done)\n")
    };
    let branches: String = CALLS.iter().map(branch).collect();
    let (all, count) = (labels.join(" "), CALLS.len());
    format!(
        r#"(module {imports} (memory (export "memory") 2)
  (func (export "run") (local $call i32) (local $left i32)
    (i32.store (i32.const 0) (i32.const {INPUT})) (i32.store (i32.const 4) (i32.const {INPUT_BYTES}))
    (drop (call $fd_read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
    (local.set $left (i32.and (i32.load8_u (i32.const {INPUT})) (i32.const 15)))
    (local.set $call (i32.const {INPUT}))
    (block $end (loop $next
      (br_if $end (i32.eqz (local.get $left)))
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (local.set $call (i32.add (local.get $call) (i32.const {CALL_BYTES})))
      (block $done {opened}
        (br_table {all} (i32.rem_u (i32.load8_u (local.get $call)) (i32.const {count})))
      {branches})
      (br $next)))))"#
    )
}

/// Reaches whoever is asked for: one who has said a word and is gone.
struct Anyone;

impl Anyone {
    fn connection(peer: SocketAddr) -> Connection {
        let (socket, other) = UnixStream::pair().expect("a pair");
        (&other).write_all(b"word").expect("there is room");
        socket.set_nonblocking(true).expect("a socket");
        Connection { socket: socket.into(), peer, was_reset: Arc::default() }
    }
}

impl Network for Anyone {
    fn look_up(&self, name: &str, done: Done<Vec<IpAddr>>) {
        let found = ["192.0.2.1", "2001:db8::1"].map(|text| text.parse().expect("an address"));
        done(if name.is_empty() { Err(NetworkError::Unreachable) } else { Ok(found.to_vec()) });
    }

    fn connect(&self, _: Protocol, peer: SocketAddr, done: Done<Connection>) {
        done(Ok(Self::connection(peer)));
    }

    fn listen(&self, port: u16, arrived: Arrived, done: Done<()>) {
        arrived(Self::connection(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)));
        done(Ok(()));
    }
}

struct World {
    scheduler: Scheduler,
    tenant: Tenant,
    run: Function,
}

fn grant(folder: &Path) -> CapabilitySet {
    let folder = folder.display();
    let text = format!(
        "version = 1\n[memory]\nlimit = \"1M\"\n[stdio]\n[clock]\n[random]\n
         [network]\nconnect = [\"a.test:1\"]\n
         [[folder]]\nhost = \"{folder}\"\nguest = \"/data\"\nrights = [\"read\", \"write\"]"
    );
    CapabilitySet::parse(&text, Path::new("/")).expect("the grant is well-formed")
}

impl World {
    fn shared() -> &'static Self {
        static WORLD: OnceLock<World> = OnceLock::new();
        WORLD.get_or_init(|| {
            let config = SchedulerConfig { workers: 2, ..SchedulerConfig::default() };
            let scheduler = Scheduler::new(&config).expect("a scheduler");
            let tenant = scheduler.tenant(TENANT, 1, Priority::Normal);
            let pool = Pool { isolates: 8, stacks: 8, ..Pool::default() };
            let run = Admission::new(Policy::pooled(pool))
                .admit_for(TENANT, module().as_bytes(), &grant(Path::new("/f")), Metering::Time)
                .and_then(|admitted| admitted.function(TENANT, "run"))
                .expect("the module is admitted");
            World { scheduler, tenant, run }
        })
    }
}

/// The host answers with an errno or ends the call, whatever it is asked, and nothing outside the
/// folder is read or changed.
pub fn calls(bytes: &[u8]) {
    let outside = furnished();
    perform(bytes, &outside.path().join("folder"), DEADLINE);
    let mut names: Vec<_> = fs::read_dir(outside.path())
        .expect("a directory")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["folder", "secret"], "nothing is made outside the folder");
    let secret = fs::read_to_string(outside.path().join("secret")).expect("a file");
    assert_eq!(secret, SECRET, "nothing outside the folder is changed");
}

/// A folder with a file, a directory and a link that leads out, and a secret beside it.
fn furnished() -> tempfile::TempDir {
    let outside = tempfile::tempdir().expect("a temporary directory");
    let folder = outside.path().join("folder");
    fs::create_dir_all(folder.join("d")).expect("a directory");
    fs::write(folder.join("f"), "content").expect("a file");
    fs::write(outside.path().join("secret"), SECRET).expect("a file");
    std::os::unix::fs::symlink("../secret", folder.join("l")).expect("a link");
    outside
}

/// Lets the module make its calls in `folder`, for no longer than `span`.
fn perform(bytes: &[u8], folder: &Path, span: Duration) {
    let World { scheduler, tenant, run } = World::shared();
    let (stdin, mut feed) = std::io::pipe().expect("a pipe");
    feed.write_all(&bytes[..bytes.len().min(INPUT_BYTES)]).expect("a pipe holds the input");
    drop(feed);
    let mut table = Table::new(16);
    grant(folder).install(&mut table, TENANT).expect("there is room");
    let spec = Spec {
        args: vec!["fuzz".to_owned(), "word".to_owned()],
        env: vec![("NAME".to_owned(), "value".to_owned())],
        stdin: Some(OwnedFd::from(stdin)),
        network: Some(Arc::new(Anyone)),
        ..Spec::default()
    };
    let attached = scheduler.attach(&table, TENANT, spec).expect("the folder is there");
    let limits = CallLimits {
        memory_bytes: 1 << 20,
        deadline: Some(Instant::now() + span),
        cpu_ns: None,
        threads: 0,
        fuel: 0,
    };
    let report = scheduler.run(tenant, Call::new(run, &[], limits).with(attached));
    assert!(report.is_ok(), "the call was not taken");
}

/// An input of these calls. `data` lies behind them, where [`data`] says.
fn input(calls: &[(&str, &[u64])], data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; CALL_BYTES];
    bytes[0] = calls.len() as u8;
    for (name, words) in calls {
        let op = CALLS.iter().position(|(known, _)| known == name).expect("the call is known");
        let mut call = [0; CALL_BYTES];
        call[0] = op as u8;
        for (at, word) in words.iter().enumerate() {
            call[WORDS + 8 * at..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes.extend(call);
    }
    bytes.extend(data);
    bytes
}

/// Where the data of an input with so many calls lies.
fn data(calls: u64) -> u64 {
    u64::from(INPUT) + CALL_BYTES as u64 * (calls + 1)
}

/// The number of the first socket of a call.
const SOCKET: u64 = 1 << 25;

/// An address of four octets, and a buffer of eight bytes, both in what is below the input.
fn described(calls: u64) -> Vec<u8> {
    let [octets, buffer] = [data(calls) as u32 + 16, 768];
    [octets, 4, buffer, 8].map(u32::to_le_bytes).concat()
}

/// Files and links are made, read and renamed, waits waited, peers talked to, and ways out tried.
pub fn seeds() -> Vec<Vec<u8>> {
    // Descriptor 3 is the folder, and 4 what is opened first, to be read and written.
    let (folder, out, rights) = (3, 512, 1 << 1 | 1 << 6);
    let text = b"f\0d\0l\0n\0../secret\0";
    let vector = |calls: u64| [(data(calls) as u32).to_le_bytes(), 8_u32.to_le_bytes()].concat();
    let with_vector = |calls: u64| [&vector(calls)[..], text].concat();
    let clock = {
        // A subscription: user data, clock tag, then id, timeout, precision and flags.
        let mut wanted = [0_u8; 48];
        wanted[24..32].copy_from_slice(&1_000_u64.to_le_bytes());
        wanted
    };
    vec![
        input(
            &[
                ("args_sizes_get", &[out, out + 4]),
                ("args_get", &[out, out + 64]),
                ("environ_get", &[out, out + 64]),
                ("clock_time_get", &[0, 0, 0]),
                ("random_get", &[out, 32]),
                ("fd_prestat_get", &[folder, out]),
                ("fd_prestat_dir_name", &[folder, out, 5]),
            ],
            &[],
        ),
        input(
            &[
                ("path_open", &[folder, 1, data(4), 1, 0, rights, 0, 0, out]),
                ("fd_read", &[4, data(4), 1, out]),
                ("fd_filestat_get", &[4, out]),
                ("fd_readdir", &[folder, out, 256, 0, out]),
            ],
            text,
        ),
        input(&[("fd_write", &[1, data(2), 1, out]), ("fd_tell", &[1, out])], &with_vector(2)),
        input(&[("poll_oneoff", &[data(1), out, 1, out + 64])], &clock),
        input(
            &[
                ("path_create_directory", &[folder, data(5) + 6, 1]),
                ("path_rename", &[folder, data(5), 1, folder, data(5) + 6, 1]),
                ("path_symlink", &[data(5) + 8, 9, folder, data(5) + 6, 1]),
                ("path_readlink", &[folder, data(5) + 4, 1, out, 64, out + 64]),
                ("path_unlink_file", &[folder, data(5), 1]),
            ],
            text,
        ),
        input(
            &[
                ("path_open", &[folder, 1, data(4) + 4, 1, 0, rights, 0, 0, out]),
                ("path_open", &[folder, 1, data(4) + 8, 9, 0, rights, 0, 0, out]),
                ("path_link", &[folder, 1, data(4) + 4, 1, folder, data(4) + 6, 1]),
                ("path_filestat_get", &[folder, 1, data(4) + 8, 9, out]),
            ],
            text,
        ),
        // The first socket. Its peer's address is described where the data lies, a buffer behind.
        input(
            &[
                ("sock_open", &[1, 2, out]),
                ("sock_connect", &[SOCKET, data(7), 80]),
                ("sock_recv", &[SOCKET, data(7) + 8, 1, 0, out, out + 4]),
                ("sock_send", &[SOCKET, data(7) + 8, 1, 0, out]),
                ("sock_getpeeraddr", &[SOCKET, data(7), out, out + 4]),
                ("sock_shutdown", &[SOCKET, 2]),
                ("fd_close", &[SOCKET]),
            ],
            &[described(7), text.to_vec()].concat(),
        ),
        input(
            &[
                ("sock_open", &[1, 1, out]),
                ("sock_send_to", &[SOCKET, data(7) + 8, 1, data(7), 53, 0, out]),
                ("sock_recv_from", &[SOCKET, data(7) + 8, 1, data(7), 0, out, out + 4, out + 8]),
                ("sock_open", &[1, 2, out]),
                ("sock_bind", &[SOCKET + 1, data(7), 80]),
                ("sock_listen", &[SOCKET + 1, 1]),
                ("sock_accept", &[SOCKET + 1, 0, out]),
            ],
            &[described(7), text.to_vec()].concat(),
        ),
        input(
            &[
                ("sock_getaddrinfo", &[data(4), 1, data(4), 0, out, data(4) + 4, 2, out]),
                ("sock_open", &[2, 0, out]),
                ("sock_setsockopt", &[SOCKET, 0, 11, out, 16]),
                ("sock_getsockopt", &[SOCKET, 0, 2, out, out + 16]),
            ],
            text,
        ),
        input(
            &[
                ("fd_read", &[0, u64::from(u32::MAX - 3), 1, out]),
                ("fd_write", &[1, out, u64::from(u32::MAX), out]),
                ("poll_oneoff", &[out, out, u64::from(u32::MAX), out]),
                ("random_get", &[out, u64::from(u32::MAX)]),
                ("fd_renumber", &[folder, u64::from(u32::MAX)]),
                ("sock_recv", &[folder, out, 1, 0, out, out]),
            ],
            &[],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_exovisor::{Effect, Import, Item};

    #[test]
    fn the_calls_of_an_input_are_made() {
        let outside = furnished();
        let folder = outside.path().join("folder");
        let makes = |seed: &&Vec<u8>| {
            perform(seed, &folder, Duration::from_secs(60));
            folder.join("n").is_dir() && !folder.join("f").exists()
        };
        assert!(seeds().iter().any(|seed| makes(&seed)), "no seed made a directory");
    }

    #[test]
    fn every_call_that_may_reach_outside_is_made() {
        let made: Vec<&str> = CALLS.iter().map(|(name, _)| *name).collect();
        let wasi = Import::all().iter().filter(|import| {
            import.module == "wasi_snapshot_preview1" && import.item == Item::Function
        });
        for import in wasi.filter(|import| import.effect != Effect::Pure) {
            assert!(made.contains(&import.name), "{} is not called", import.name);
        }
    }
}
