//! Tables and units for people. What is shown may be a guest's word, so it is made
//! printable here.

use std::io::{BufRead, Write};

use exocell_cell::CellError;
use exocell_cell::agent::{printable, printable_lines};

/// `println!` for a reader that may go away (`| head`): that ends this command
/// quietly.
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::show::line(format_args!($($argument)*))
    };
}
pub(crate) use say;

/// Says something beside the result, on standard error. Whoever does not listen is not told.
macro_rules! tell {
    ($($argument:tt)*) => {
        $crate::show::aside(format_args!($($argument)*))
    };
}
pub(crate) use tell;

pub fn aside(text: std::fmt::Arguments<'_>) {
    // A closed pipe must not end what goes on.
    let _ = writeln!(std::io::stderr(), "{text}");
}

pub fn line(text: std::fmt::Arguments<'_>) {
    if writeln!(std::io::stdout(), "{text}").is_err() {
        std::process::exit(0);
    }
}

/// Says what went wrong, on standard error: on one line, but for what this host's own
/// tools wrote on several.
pub fn complain(error: &CellError) {
    let text = error.to_string();
    match error {
        CellError::Kernel(_) | CellError::Caps(_) => {
            tell!("exocell: {}", printable_lines(&text))
        }
        _ => tell!("exocell: {}", printable(&text)),
    }
}

/// Does `act` for each of what a command names. As docker has it, what fails of one is told and
/// no reason to leave the others. The exit code is that of the last that failed.
pub fn each(keys: &[String], mut act: impl FnMut(&str) -> Result<(), CellError>) -> u8 {
    let mut code = 0;
    for key in keys {
        if let Err(error) = act(key) {
            complain(&error);
            code = error.exit_code();
        }
    }
    code
}

/// Prints the lines of `from`, which a guest wrote, as far as they can be read as text.
pub fn lines(from: impl BufRead) -> std::io::Result<()> {
    for line in from.split(b'\n') {
        let line = line?;
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        say!("{}", printable(&String::from_utf8_lossy(line)));
    }
    Ok(())
}

/// Prints rows under `header`, columns aligned.
pub fn table(header: &[&str], rows: &[Vec<String>]) {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| printable(cell).into_owned()).collect())
        .collect();
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.len()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let print = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> =
            cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        say!("{}", padded.join("   ").trim_end());
    };
    print(&mut header.iter().copied());
    for row in &rows {
        print(&mut row.iter().map(String::as_str));
    }
}

/// `bytes` in the largest binary unit that leaves a whole part.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// How long ago `then_ms` was, roughly.
pub fn ago(then_ms: u64) -> String {
    let seconds = exocell_cell::now_ms().saturating_sub(then_ms) / 1000;
    match seconds {
        0..=119 => format!("{seconds} seconds ago"),
        120..=7199 => format!("{} minutes ago", seconds / 60),
        7200..=172_799 => format!("{} hours ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_are_shown_in_binary_units() {
        assert_eq!(super::bytes(512), "512 B");
        assert_eq!(super::bytes(1536), "1.5 KiB");
        assert_eq!(super::bytes(3 << 30), "3.0 GiB");
    }
}
