//! How much of a thing a client may say: what a cell cannot take is refused when it is said,
//! and not when it is used.

use exocell_cell::CellSpec;
use exocell_cell::agent::{Exec, Request};
use serde::Serialize;

use crate::containers::Container;
use crate::error::{ApiError, ApiResult};

/// The longest name of a container.
const NAME_BYTES_MAX: usize = 128;
/// The longest name of a host and of a domain (sethostname(2)).
const HOST_NAME_BYTES_MAX: usize = 64;
/// A program, its arguments and its environment, as JSON: Linux takes 2 MiB of them (execve(2)).
const PROGRAM_BYTES_MAX: usize = 3 << 20;
/// Where its mounts are.
const MOUNTS_BYTES_MAX: usize = 64 << 10;
/// The labels of a container, which every event of it repeats.
const LABELS_BYTES_MAX: usize = 64 << 10;

/// Whether a container may be called `name`.
pub fn check_name(name: &str) -> ApiResult<()> {
    CellSpec::check_name(name)?;
    match name.len() > NAME_BYTES_MAX {
        true => Err(ApiError::bad_request(format!(
            "the name has {} letters; give it {NAME_BYTES_MAX} at most",
            name.len()
        ))),
        false => Ok(()),
    }
}

/// Whether a cell takes what `container` is.
pub fn check(container: &Container) -> ApiResult<()> {
    let (spec, config) = (&container.spec, &container.config);
    for (what, name) in [("host", &config.hostname), ("domain", &config.domainname)] {
        if name.len() > HOST_NAME_BYTES_MAX {
            return Err(ApiError::bad_request(format!(
                "the {what} name has {} letters; give it {HOST_NAME_BYTES_MAX} at most",
                name.len()
            )));
        }
    }
    check_program(spec)?;
    let words = "its program, environment and settings";
    at_most(PROGRAM_BYTES_MAX, words, &(&spec.command, &config.env, &spec.settings))?;
    if let Some(check) = &spec.health {
        at_most(PROGRAM_BYTES_MAX, "its health check and environment", &(check, &config.env))?;
    }
    let targets: Vec<&str> = container.mounts.iter().map(|mount| mount.target.as_str()).collect();
    at_most(MOUNTS_BYTES_MAX, "its mounts", &targets)?;
    at_most(LABELS_BYTES_MAX, "its labels", &config.labels)
}

/// What the start of a program would find wrong with its own words.
fn check_program(spec: &CellSpec) -> ApiResult<()> {
    let lists = [("Cmd", &spec.command), ("Env", &spec.env)];
    let words = lists.iter().flat_map(|(what, list)| list.iter().map(move |word| (*what, word)));
    let single = [("WorkingDir", &spec.working_dir), ("User", &spec.user)];
    let single = single.into_iter().filter_map(|(what, word)| word.as_ref().map(|w| (what, w)));
    for (what, word) in words.chain(single) {
        if word.contains('\0') {
            return Err(ApiError::bad_request(format!("{what} holds a NUL byte; remove it")));
        }
    }
    match &spec.working_dir {
        Some(path) if !path.starts_with('/') => Err(ApiError::bad_request(format!(
            "the working directory '{path}' is invalid, it needs to be an absolute path"
        ))),
        _ => Ok(()),
    }
}

/// Whether a cell takes `program` beside its own.
pub fn check_exec(program: &Exec) -> ApiResult<()> {
    let words = "the program, its arguments and environment";
    at_most(PROGRAM_BYTES_MAX, words, &Request::Exec(program.clone()))
}

fn at_most(most: usize, words: &str, value: &impl Serialize) -> ApiResult<()> {
    let text = serde_json::to_vec(value)
        .map_err(|error| ApiError::internal(format!("{words} cannot be written: {error}")))?;
    match text.len() > most {
        true => Err(ApiError::bad_request(format!(
            "{words} are {} bytes long, and a cell takes {most}; give what is long as a file \
             (docker cp) or on standard input",
            text.len()
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containers::tests::with_one;

    #[test]
    fn what_a_cell_cannot_take_is_refused_when_it_is_said() {
        let root = tempfile::tempdir().unwrap();
        let plain = with_one(root.path(), "x").find("x").unwrap().container;
        check(&plain).unwrap();
        let long = |bytes: usize| "y".repeat(bytes);
        let with = |change: &dyn Fn(&mut Container)| {
            let mut container = plain.clone();
            change(&mut container);
            check(&container)
        };
        with(&|c| c.spec.command = vec!["sh".into(), "-c".into(), long(2 << 20)]).unwrap();
        for (refused, word) in [
            (with(&|c| c.spec.command = vec!["sh".into(), "-c".into(), long(4 << 20)]), "program"),
            (with(&|c| c.config.env = vec![long(4 << 20)]), "environment"),
            (with(&|c| c.config.hostname = long(65)), "host name"),
            (with(&|c| c.config.domainname = long(300)), "domain name"),
            (with(&|c| c.spec.command.push("a\0b".into())), "Cmd"),
            (with(&|c| c.spec.env.push("A=\0".into())), "Env"),
            (with(&|c| c.spec.working_dir = Some("src".into())), "absolute path"),
            (with(&|c| c.spec.working_dir = Some("/\0".into())), "WorkingDir"),
            (with(&|c| drop(c.config.labels.insert("a".into(), long(70_000)))), "labels"),
            (
                with(&|c| {
                    let host = |n: u32| (format!("h{n}"), std::net::Ipv4Addr::from(n).into());
                    c.spec.settings.hosts = (0..200_000).map(host).collect();
                }),
                "settings",
            ),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{error}");
            assert!(error.message.contains(word), "{error}");
        }
        let exec = |bytes: usize| Exec { args: vec![long(bytes)], ..Exec::default() };
        check_exec(&exec(2 << 20)).unwrap();
        let error = check_exec(&exec(4 << 20)).unwrap_err();
        assert!(error.status == 400 && error.message.contains("a cell takes 3145728"), "{error}");
        check_name(&long(128)).unwrap();
        assert_eq!(check_name(&long(129)).unwrap_err().status.as_u16(), 400);
        assert!(check_name("a/b").is_err());
    }
}
