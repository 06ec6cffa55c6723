//! The binary of [`exocell_init`].
fn main() {
    exocell_init::run()
}
