# A formula for a tap, as Formula/quire-engine.rb. Not published, and not installed with Homebrew.
# `.ci/recipes/fill` replaces what stands between @. `brew update-python-resources quire-engine` then
# writes a resource for each dependency that is no formula.
class QuireEngine < Formula
  include Language::Python::Virtualenv

  desc "LLM inference engine with OpenAI's API, fast on CPUs"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "rust" => :build # of tokenizers, safetensors, llguidance
  depends_on "numpy"
  depends_on "pillow"
  depends_on "python@3.14"
  depends_on "pytorch"

  def install
    virtualenv_install_with_resources using: "python3.14"
  end

  service do
    run [opt_bin/"quire", "serve"]
    keep_alive true
    log_path var/"log/quire.log"
    error_log_path var/"log/quire.log"
  end

  test do
    refute_empty shell_output("#{bin}/quire generate 'Once upon a time' --max-tokens 8").strip
  end
end
