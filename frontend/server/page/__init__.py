"""The page at /: HTML, style sheets and scripts, which routes/page.py joins into one document.

Must not know: anything.
"""
