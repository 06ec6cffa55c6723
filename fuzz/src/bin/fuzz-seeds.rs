//! `fuzz-seeds DIR` writes each target's seeds to DIR/TARGET and prints the
//! targets' names.

use std::fs;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(std::io::Error::other("usage: fuzz-seeds DIR"));
    };
    for target in exocell_fuzz::TARGETS {
        let place = directory.join(target.name);
        fs::create_dir_all(&place)?;
        for (index, seed) in (target.seeds)().iter().enumerate() {
            fs::write(place.join(format!("seed-{index}")), seed)?;
        }
        println!("{}", target.name);
    }
    Ok(())
}
