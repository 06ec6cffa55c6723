//! Where a run's files lie.
//!
//! ```text
//! LOGS/RUN_ID/run.json                 what was run; also the run's lock
//! LOGS/RUN_ID/MODEL/INSTANCE_ID/       patch.diff, eval.sh, test_output.txt,
//!                                      run_instance.log, report.json, cell.json
//! REPORT_DIR/MODEL.RUN_ID.json         the final report
//! ```
//! An instance with a `report.json` is done; another run goes on with the rest.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::dataset::Prediction;
use crate::error::SwebenchError;

pub const REPORT: &str = "report.json";
pub const TEST_OUTPUT: &str = "test_output.txt";
pub const USAGE: &str = "cell.json";
pub const LOG: &str = "run_instance.log";

/// The folder of a run.
#[derive(Debug, Clone)]
pub struct Place {
    folder: PathBuf,
}

impl Place {
    pub fn new(logs: &Path, run_id: &str) -> Self {
        Self { folder: logs.join(run_id) }
    }

    /// The folder of an instance.
    pub fn of(&self, prediction: &Prediction) -> PathBuf {
        self.folder.join(prediction.model()).join(&prediction.instance_id)
    }

    /// Makes the run's folder and writes down what is run. Nobody else gets
    /// the run while the file is held.
    pub fn take(&self, content: &str) -> Result<File, SwebenchError> {
        let path = self.folder.join("run.json");
        fs::create_dir_all(&self.folder).map_err(SwebenchError::file("make", &self.folder))?;
        let failed = || SwebenchError::file("write", &path);
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed())?;
        file.try_lock().map_err(|_| SwebenchError::Busy(self.folder.clone()))?;
        file.set_len(0).and_then(|()| file.write_all(content.as_bytes())).map_err(failed())?;
        Ok(file)
    }
}

/// Writes `path` at once or not at all.
pub fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}

/// The log of one instance: each entry under the seconds since it was begun.
pub struct Log {
    file: File,
    begun: Instant,
}

impl Log {
    pub fn create(path: &Path, begun: Instant) -> std::io::Result<Self> {
        Ok(Self { file: File::create(path)?, begun })
    }

    pub fn add(&mut self, text: &str) {
        let seconds = self.begun.elapsed().as_secs_f64();
        // A log that cannot be written costs no verdict.
        let _ = writeln!(self.file, "[{seconds:10.3} s] {}", text.trim_end());
    }
}
