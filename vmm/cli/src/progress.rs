//! Progress on standard error: a bar where that is a terminal, a line a step
//! where it is not.

use std::io::IsTerminal;
use std::time::Duration;

use exocell_cell::agent::printable;
use exocell_cell::kernel::{Progress, Step};
use indicatif::{ProgressBar, ProgressStyle};

/// A bar, or lines.
pub struct Bar {
    bar: Option<ProgressBar>,
}

impl Bar {
    pub fn new(total: u64, template: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { bar: None };
        }
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar: Some(bar) }
    }

    pub fn step(&self, message: &str) {
        let message = printable(message);
        match &self.bar {
            Some(bar) => bar.set_message(message.into_owned()),
            None => crate::show::tell!("{message}"),
        }
    }

    pub fn set(&self, position: u64, total: Option<u64>) {
        if let Some(bar) = &self.bar {
            if let Some(total) = total {
                bar.set_length(total);
            }
            bar.set_position(position);
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The guest kernel's build.
pub struct KernelProgress {
    bar: Bar,
    step: Option<Step>,
}

impl KernelProgress {
    pub fn new() -> Self {
        let bar = Bar::new(1000, "{spinner} {msg:40} [{bar:30}] {elapsed}");
        Self { bar, step: None }
    }

    pub fn step(&mut self, progress: &Progress) {
        if self.step != Some(progress.step) {
            self.step = Some(progress.step);
            self.bar.step(&format!("guest kernel: {}", progress.step));
        }
        let fraction = progress.fraction.unwrap_or(0.0);
        self.bar.set((fraction * 1000.0) as u64, None);
    }

    pub fn finish(&self) {
        self.bar.finish();
    }
}
