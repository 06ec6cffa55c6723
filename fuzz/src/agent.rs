//! The agent protocol: frames from a hostile init, and what each client
//! function makes of its answers.

use std::io;

use exocell_agent::client::{self, ExecEvent};
use exocell_agent::{
    Boot, BootTimes, Exec, FailureKind, FrameReader, FrameWriter, Kind, Reply, TtySize,
};

/// The most bytes a download may bring.
const DOWNLOAD_BYTES_MAX: u64 = 1 << 20;

/// Frames, and the JSON in those that should have some.
pub fn frames(bytes: &[u8]) {
    let mut reader = FrameReader::new(bytes);
    while let Ok(Some(frame)) = reader.read() {
        // What is no JSON is an error; all that matters is that it is one.
        match frame.kind {
            Kind::Reply => drop(frame.json::<Reply>()),
            Kind::Resize => drop(frame.json::<TtySize>()),
            Kind::Request => drop(frame.json::<exocell_agent::Request>()),
            _ => {}
        }
    }
}

/// The first byte chooses the function that meets the rest.
pub fn client(bytes: &[u8]) {
    let (choice, answers) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    // Errors are what is expected of most inputs.
    match choice % 7 {
        0 => drop(client::boot(answers, io::sink(), &Boot::default(), || ())),
        1 => drop(client::stats(answers, io::sink())),
        2 => drop(client::shutdown(answers, io::sink(), 0)),
        3 => drop(client::upload(answers, io::sink(), "/", &mut &[0; 100][..])),
        4 => download(answers),
        5 => drop(client::signal(answers, io::sink(), 1, 15)),
        _ => exec(answers),
    }
}

fn download(answers: &[u8]) {
    let mut got = Vec::new();
    let _ = client::download(answers, io::sink(), "/", &mut got, DOWNLOAD_BYTES_MAX);
    assert!(got.len() as u64 <= DOWNLOAD_BYTES_MAX, "a download is bounded");
}

fn exec(answers: &[u8]) {
    let Ok(session) = client::exec(answers, io::sink(), &Exec::default()) else { return };
    let mut output = session.output;
    while let Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_)) = output.event() {}
}

/// Conversations as an honest init holds them.
pub fn seeds() -> Vec<Vec<u8>> {
    let failed = Reply::Failed { kind: FailureKind::NotFound, message: "no such file".to_owned() };
    let answers = [
        vec![(Kind::Reply, json(&Reply::Ready(BootTimes::default())))],
        vec![(Kind::Reply, json(&Reply::Done))],
        vec![(Kind::Reply, json(&failed))],
        vec![(Kind::Data, b"tar".to_vec()), (Kind::DataEof, Vec::new())],
        vec![
            (Kind::Reply, json(&Reply::Started { guest_pid: 7 })),
            (Kind::Stdout, b"out".to_vec()),
            (Kind::Stderr, b"err".to_vec()),
            (Kind::Reply, json(&Reply::exited(3))),
        ],
    ];
    let choices = [0, 2, 6, 4, 6];
    choices.into_iter().zip(&answers).map(|(choice, frames)| conversation(choice, frames)).collect()
}

fn json(reply: &Reply) -> Vec<u8> {
    serde_json::to_vec(reply).unwrap_or_default()
}

fn conversation(choice: u8, frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![choice];
    let mut writer = FrameWriter::new(&mut bytes);
    for (kind, payload) in frames {
        // Writing to memory cannot fail.
        let _ = writer.write(*kind, payload);
    }
    bytes
}
