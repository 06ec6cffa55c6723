//! Every host function, called with arguments that no compiler would make.

use exocell_exovisor::{CancelReason, Import, Outcome, Spec};
use proptest::prelude::*;
use std::path::Path;

use crate::common::{caps_with, ready, table};

/// Each function of preview 1 and its parameters, `i` for i32 and `I` for i64, from
/// `wasi_snapshot_preview1.witx` and WasmEdge's sockets. All answer with an i32, except
/// `proc_exit`.
const SIGNATURES: [(&str, &str); 57] = [
    ("args_get", "ii"),
    ("args_sizes_get", "ii"),
    ("clock_res_get", "ii"),
    ("clock_time_get", "iIi"),
    ("environ_get", "ii"),
    ("environ_sizes_get", "ii"),
    ("fd_advise", "iIIi"),
    ("fd_allocate", "iII"),
    ("fd_close", "i"),
    ("fd_datasync", "i"),
    ("fd_fdstat_get", "ii"),
    ("fd_fdstat_set_flags", "ii"),
    ("fd_fdstat_set_rights", "iII"),
    ("fd_filestat_get", "ii"),
    ("fd_filestat_set_size", "iI"),
    ("fd_filestat_set_times", "iIIi"),
    ("fd_pread", "iiiIi"),
    ("fd_prestat_dir_name", "iii"),
    ("fd_prestat_get", "ii"),
    ("fd_pwrite", "iiiIi"),
    ("fd_read", "iiii"),
    ("fd_readdir", "iiiIi"),
    ("fd_renumber", "ii"),
    ("fd_seek", "iIii"),
    ("fd_sync", "i"),
    ("fd_tell", "ii"),
    ("fd_write", "iiii"),
    ("path_create_directory", "iii"),
    ("path_filestat_get", "iiiii"),
    ("path_filestat_set_times", "iiiiIIi"),
    ("path_link", "iiiiiii"),
    ("path_open", "iiiiiIIii"),
    ("path_readlink", "iiiiii"),
    ("path_remove_directory", "iii"),
    ("path_rename", "iiiiii"),
    ("path_symlink", "iiiii"),
    ("path_unlink_file", "iii"),
    ("poll_oneoff", "iiii"),
    ("proc_exit", "i"),
    ("proc_raise", "i"),
    ("random_get", "ii"),
    ("sched_yield", ""),
    ("sock_accept", "iii"),
    ("sock_recv", "iiiiii"),
    ("sock_send", "iiiii"),
    ("sock_shutdown", "ii"),
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

fn import(name: &str, parameters: &str) -> String {
    let types: Vec<&str> = parameters.chars().map(width).collect();
    let result = if name == "proc_exit" { "" } else { "(result i32)" };
    let types = types.join(" ");
    format!(
        "(import \"wasi_snapshot_preview1\" \"{name}\" (func ${name} (param {types}) {result}))\n"
    )
}

fn width(parameter: char) -> &'static str {
    if parameter == 'I' { "i64" } else { "i32" }
}

/// Calls `calls` in turn, each with the next of `values`.
fn module(calls: &[usize], values: &[i64]) -> String {
    let mut values = values.iter().cycle();
    let imports: String =
        SIGNATURES.iter().map(|(name, parameters)| import(name, parameters)).collect();
    let mut body = String::new();
    for (name, parameters) in calls.iter().map(|index| SIGNATURES[*index]) {
        let constant = |(parameter, value): (char, &i64)| match parameter {
            'I' => format!("(i64.const {value})"),
            _ => format!("(i32.const {})", *value as i32),
        };
        let arguments: String = parameters.chars().zip(&mut values).map(constant).collect();
        let call = format!("(call ${name} {arguments})\n");
        body += &if name == "proc_exit" { call } else { format!("(drop {call})") };
    }
    format!(
        "(module {imports} (memory (export \"memory\") 1) (data (i32.const 8) \"ab/../c\") (func (export \"_start\") {body}))"
    )
}

fn everything(folder: &Path, deadline: &str) -> exocell_xgate::CapabilitySet {
    let folder = folder.display();
    caps_with(&format!(
        "[clock]\n[random]\n[network]\n[time]\ndeadline = \"{deadline}\"\n\
         [[folder]]\nhost = \"{folder}\"\nguest = \"/\"\nrights = [\"read\", \"write\"]"
    ))
}

#[test]
fn every_name_has_the_signature_of_the_standard() {
    let folder = tempfile::tempdir().unwrap();
    let caps = everything(folder.path(), "60s");
    let wasi = Import::all().iter().filter(|import| import.module == "wasi_snapshot_preview1");
    let names: Vec<&str> = wasi.map(|import| import.name).collect();
    assert_eq!(names.len(), SIGNATURES.len());
    assert!(SIGNATURES.iter().all(|(name, _)| names.contains(name)));
    assert_eq!(
        ready(&module(&[], &[0]), &caps, &table(&caps), Spec::default()).run(),
        Outcome::Exited(0)
    );
}

fn value() -> impl Strategy<Value = i64> {
    prop_oneof![
        0i64..12,
        Just(-1),
        Just(65535),
        Just(65528),
        Just(i64::MAX),
        Just(i64::MIN),
        Just(1 << 20),
        any::<i64>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The host neither panics nor hangs, and nothing appears beside the folder.
    #[test]
    fn no_call_breaks_the_host(
        calls in prop::collection::vec(0..SIGNATURES.len(), 1..6),
        values in prop::collection::vec(value(), 1..40),
    ) {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("granted");
        std::fs::create_dir(&folder).unwrap();
        let caps = everything(&folder, "300ms");
        let outcome = ready(&module(&calls, &values), &caps, &table(&caps), Spec::default()).run();
        let fine = matches!(outcome, Outcome::Exited(_) | Outcome::Trap(_) | Outcome::Ended(CancelReason::Deadline));
        prop_assert!(fine, "{outcome:?}");
        prop_assert_eq!(std::fs::read_dir(outer.path()).unwrap().count(), 1);
    }
}
